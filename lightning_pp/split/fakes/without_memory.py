"""Building a model without memory for its parameters, while everything else in it is real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Within, a parameter goes to the meta device as soon as a module is given it.

    Buffers and all that a constructor computes stay real, unlike under ``torch.device("meta")``, so that masks,
    frequencies and branches on them work, and nothing needs to be filled later. At any time at most the parameter that
    is being made has memory, and that is hardly ever written to: initialisers find it on the meta device.
    """
    original = nn.Module.register_parameter
    moved: dict[nn.Parameter, nn.Parameter] = {}  # several modules may be given the same

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and not isinstance(param, UninitializedParameter):
            if param not in moved:
                moved[param] = moved[param] = _on_meta(param)
            param = moved[param]
        original(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    found = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    if type(parameter) is not nn.Parameter:  # a class of the user's own, with attributes of its own
        found.__class__ = type(parameter)
    vars(found).update(vars(parameter))
    return found
