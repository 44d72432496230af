"""How one parameter lies over the tensor axis, and its values as a part and as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TensorPart:
    """The part of a parameter that one tensor rank holds.

    Args:
        dim: The dimension that is cut.
        shape: Shape of the whole parameter.
        pieces: Runs ``[start, stop)`` of ``dim`` that this rank holds, in order. A fused projection has one for each of
            query, key and value.
    """

    dim: int
    shape: torch.Size
    pieces: tuple[tuple[int, int], ...]

    @property
    def local_shape(self) -> torch.Size:
        """Shape of what this rank holds."""
        local = list(self.shape)
        local[self.dim] = sum(stop - start for start, stop in self.pieces)
        return torch.Size(local)


def pieces_of(segments: Sequence[int], rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """The runs that tensor rank ``rank`` of ``size`` holds of a dimension made of ``segments``, each cut evenly."""
    pieces, start = [], 0
    for length in segments:
        share = length // size
        pieces.append((start + rank * share, start + (rank + 1) * share))
        start += length
    return tuple(pieces)


def part_of(whole: Tensor, part: TensorPart) -> Tensor:
    """This rank's values of ``whole``, contiguous."""
    runs = [whole.narrow(part.dim, start, stop - start) for start, stop in part.pieces]
    # cat copies; a single run is cloned, so that it does not keep the whole alive
    return torch.cat(runs, part.dim) if len(runs) > 1 else runs[0].clone(memory_format=torch.contiguous_format)


def whole_of(local: Tensor, part: TensorPart, group: dist.ProcessGroup) -> Tensor:
    """The whole values, gathered from the parts; all ranks of ``group`` call it."""
    return joined(local, part.dim, [stop - start for start, stop in part.pieces], group)


def joined(local: Tensor, dim: int, lengths: Sequence[int], group: Any, gather: Any = dist.all_gather) -> Tensor:
    """All ranks' parts joined, each made of runs of ``lengths`` in ``dim``."""
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
    gather(parts, local.detach().contiguous(), group=group)
    by_rank = [torch.split(each, list(lengths), dim) for each in parts]
    return torch.cat([runs[i] for i in range(len(lengths)) for runs in by_rank], dim)
