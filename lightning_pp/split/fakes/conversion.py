"""Conversions of modules within a step (``self.router.to(torch.float32)`` in ``forward``) while parameters are fake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.split._torch_private import convert, parameters_of, replaced_module_apply, set_parameters
from lightning_pp.split.fakes.parameters import is_fake

Apply = Callable[..., nn.Module]


def convertible_fakes() -> AbstractContextManager[None]:
    """Within, ``Module.to``, ``float``, ``half`` and the like work on modules whose parameters are fake.

    Torch swaps the two tensors in place there, which it refuses for any tensor that something refers to weakly. Here a
    converted parameter takes the place of the fake in its module, and one that is as it should be stays.
    """
    return replaced_module_apply(_converting)


def _converting(original: Apply) -> Apply:
    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in module.children():
                convert(child, function)
        parameters = parameters_of(module)
        if not any(is_fake(parameter) for parameter in parameters.values()):
            original(module, function, recurse=False)
            return module
        set_parameters(module, {key: value for key, value in parameters.items() if not is_fake(value)})
        try:
            original(module, function, recurse=False)
            real = parameters_of(module)
        finally:
            set_parameters(module, parameters)
        for key, parameter in parameters.items():
            parameters[key] = _converted(parameter, function) if is_fake(parameter) else real[key]
        return module

    return apply


def _converted(parameter: Any, function: Callable[[Tensor], Tensor]) -> Any:
    with torch.no_grad():
        converted = function(parameter)
    if (converted.dtype, converted.device) == (parameter.dtype, parameter.device):
        return parameter
    return nn.Parameter(converted, requires_grad=parameter.requires_grad)
