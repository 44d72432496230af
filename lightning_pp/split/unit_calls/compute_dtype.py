"""Handing units their activations in the dtype that they compute in.

FSDP2 casts every floating-point input of a unit. Here only what depends on weights is cast, which the dry run knows:
positions and rotary tables, masks with the least float32 number in them and time steps, which the step computes from
the batch, keep their precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pp.split.data.tree import map_leaves
from lightning_pp.split.record.step_record import UnitCall

_CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})


def cast_activations(
    call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``call`` with its activations in ``dtype``; None: as they are."""
    if dtype is None or not call.activations:
        return args, kwargs
    place = -1

    def cast(leaf: Any) -> Any:
        nonlocal place
        place += 1
        if place in call.activations and isinstance(leaf, Tensor) and leaf.dtype in _CASTABLE:
            return leaf.to(dtype)
        return leaf

    cast_args, cast_kwargs = map_leaves(cast, (args, kwargs))
    return cast_args, cast_kwargs
