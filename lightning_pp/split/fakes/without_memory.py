"""Building a model without memory for its parameters, while everything else in it is real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """In the block, a parameter goes to the meta device as soon as a module is given it.

    Buffers and all that a constructor computes stay real, unlike under ``torch.device("meta")``, so that masks,
    frequencies and branches on them work, and nothing needs to be filled later. At any time at most the parameter that
    is being made has memory, and that is hardly ever written to: initialisers find it on the meta device.
    """
    moved: dict[nn.Parameter, nn.Parameter] = {}  # several modules may be given the same

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None
        if parameter not in moved:
            moved[parameter] = _on_meta(parameter)
        return moved[parameter]

    # torch takes what the hook returns in the parameter's place; its annotation leaves that out
    with register_module_parameter_registration_hook(move):  # type: ignore[arg-type]
        yield


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    # a class of the user's own stays, with its attributes
    found = empty.as_subclass(type(parameter))
    found.requires_grad_(parameter.requires_grad)
    vars(found).update(vars(parameter))
    return found
