"""Conversions of modules within a step (``self.router.to(torch.float32)`` in ``forward``) while parameters are fake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.split._torch_private import parameters_of, replaced_module_apply
from lightning_pp.split.fakes.parameters import is_fake


def convertible_fakes() -> AbstractContextManager[None]:
    """In the block, ``Module.to``, ``float``, ``half`` and the like work on modules whose parameters are fake.

    Torch swaps the two tensors in place there, which it refuses for any tensor that something refers to weakly. Here a
    converted parameter takes the place of the fake in its module, and one that is as it should be stays.
    """
    return replaced_module_apply(_apply)


def _apply(original: Callable[..., Any], module: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    parameters = parameters_of(module)
    fakes = {key: parameter for key, parameter in parameters.items() if is_fake(parameter)}
    parameters.update(dict.fromkeys(fakes))
    try:
        original(module, function, recurse=False)
    finally:
        parameters.update(fakes)
    parameters.update({key: _converted(parameter, function) for key, parameter in fakes.items()})
    return module


def _converted(parameter: Any, function: Callable[[Tensor], Tensor]) -> Any:
    with torch.no_grad():
        converted = function(parameter)
    if (converted.dtype, converted.device) == (parameter.dtype, parameter.device):
        return parameter
    return nn.Parameter(converted, requires_grad=parameter.requires_grad)
