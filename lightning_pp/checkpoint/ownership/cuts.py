"""Parameters of which each tensor rank holds a part, and what optimizers keep for them, as blocks of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pp.checkpoint._torch_private import tree_map_only
from lightning_pp.tensor.parts import TensorPart, whole_of


@dataclass(frozen=True)
class Cuts:
    """Which parameters are cut over the tensor axis.

    Attributes:
        parts: How each lies over the axis, by canonical name.
        group: The tensor ranks; None where there is one.
    """

    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None

    def of(self, name: str, value: Any) -> TensorPart | None:
        """How ``value``, the parameter ``name`` or what an optimizer keeps for it, lies over the axis."""
        part = self.parts.get(name)
        return part if part is not None and isinstance(value, Tensor) and value.shape == part.local_shape else None

    def whole(self, name: str, value: Any) -> Any:
        """``value``, with each tensor in it that is cut gathered from all tensor ranks, which all call this."""
        if name not in self.parts:
            return value

        def gathered(tensor: Tensor) -> Tensor:
            part = self.of(name, tensor)
            if part is None:
                return tensor
            assert self.group is not None
            tensor = tensor.detach()
            return whole_of(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, part, self.group)

        return tree_map_only(Tensor, gathered, value)

    def shape(self, name: str, value: Tensor) -> torch.Size:
        """The shape of the whole of ``value``."""
        part = self.of(name, value)
        return value.shape if part is None else part.shape


NO_CUTS = Cuts()


def blocks_of(tensor: Tensor, part: TensorPart) -> dict[tuple[int, ...], Tensor]:
    """Where in the whole tensor the blocks begin that this rank holds, and views of them.

    Args:
        tensor: This rank's part; a DTensor if its rows are sharded besides.
        part: How it lies over the tensor axis.
    """
    local, first = tensor.detach(), 0
    if isinstance(local, DTensor):
        first = _first_row(local)
        local = local.to_local()
    lengths = [stop - start for start, stop in part.pieces]
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    blocks: dict[tuple[int, ...], Tensor] = {}
    begin = first if part.dim == 0 else 0
    for (start, _), (low, high) in zip(part.pieces, pairwise(ends), strict=True):
        low_here, high_here = max(low, begin), min(high, begin + local.shape[part.dim])
        if low_here < high_here and local.numel():
            offsets = [first, *[0] * (local.dim() - 1)]
            offsets[part.dim] = start + low_here - low
            blocks[tuple(offsets)] = local.narrow(part.dim, low_here - begin, high_here - low_here)
    return blocks


def _first_row(tensor: DTensor) -> int:
    """The first row of a DTensor that this rank has, of those that lie sharded in even chunks."""
    coordinate, mesh = tensor.device_mesh.get_coordinate(), tensor.device_mesh
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard(0):
            return min(tensor.shape[0], coordinate[axis] * -(-tensor.shape[0] // mesh.size(axis)))
    return 0
