"""Casts the activations of units to the dtype in which they compute.

FSDP2 casts every floating-point input of a unit. Here only what depends on weights is cast, which the dry run knows:
positions and rotary tables, masks with the least float32 number in them and time steps, which the step computes from
the batch, keep their precision. A CPU has no norm of float32 with weights of 16 bits, so weights of norms that get
float32 in their unit stay float32, as they are on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split._torch_private import overload_packet
from lightning_pp.split.data.tree import map_leaves
from lightning_pp.split.record.sources import Parameter, Source
from lightning_pp.split.record.step_record import UnitCall

_CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})
_aten = torch.ops.aten
_NORMS = {
    _aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm,
    _aten._native_batch_norm_legit, _aten._native_batch_norm_legit_no_training,
}  # fmt: skip


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


def weights_of_float32_norm(
    operation: Any, inputs: Sequence[Tensor], sources_of: Callable[[Tensor], frozenset[Source]]
) -> set[str]:
    """Canonical names of the parameters that a norm of float32 has in another dtype; none for another operation.

    Args:
        operation: What a dispatch mode sees.
        inputs: Its tensors, the one that is normed first.
        sources_of: Where the value of a tensor comes from.
    """
    if overload_packet(operation) not in _NORMS or inputs[0].dtype is not torch.float32:
        return set()
    narrow = [tensor for tensor in inputs[1:] if tensor.is_floating_point() and tensor.dtype is not torch.float32]
    return {source.name for tensor in narrow for source in sources_of(tensor) if isinstance(source, Parameter)}
