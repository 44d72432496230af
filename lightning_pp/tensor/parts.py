"""The cut of one parameter over the tensor axis, and its values as a part and as a whole."""

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


def rank_pieces(segments: Sequence[int], rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """The runs of ``segments`` that rank ``rank`` of ``size`` holds; the first hold one more if it does not divide."""
    pieces, start = [], 0
    for length in segments:
        share, rest = divmod(length, size)
        first = start + rank * share + min(rank, rest)
        pieces.append((first, first + share + int(rank < rest)))
        start += length
    return tuple(pieces)


def part_of(whole: Tensor, part: TensorPart) -> Tensor:
    """This rank's values of ``whole``, contiguous."""
    runs = [whole.narrow(part.dim, start, stop - start) for start, stop in part.pieces]
    # cat copies; a single run is cloned, so that it does not keep the whole alive
    return torch.cat(runs, part.dim) if len(runs) > 1 else runs[0].clone(memory_format=torch.contiguous_format)


def whole_of(local: Tensor, part: TensorPart, group: dist.ProcessGroup) -> Tensor:
    """The whole values, gathered from the parts; all ranks of ``group`` call it."""
    several = [group.size() * (stop - start) for start, stop in part.pieces]
    return joined(local, part.dim, several if len(several) > 1 else [part.shape[part.dim]], group)


def joined(local: Tensor, dim: int, segments: Sequence[int], group: Any, gather: Any = dist.all_gather) -> Tensor:
    """All ranks' parts joined to a tensor whose dimension ``dim`` has ``segments``, each of which is cut."""
    size = group.size()
    lengths = [[stop - start for start, stop in rank_pieces(segments, rank, size)] for rank in range(size)]
    local, lacks = local.detach(), sum(lengths[0]) - local.shape[dim]
    if lacks:  # collectives are of equal sizes
        local = torch.cat([local, torch.zeros_like(local.narrow(dim, 0, lacks))], dim)
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(size)]
    gather(parts, local.contiguous(), group=group)
    by_rank = [torch.split(each.narrow(dim, 0, sum(own)), own, dim) for each, own in zip(parts, lengths, strict=True)]
    return torch.cat([runs[i] for i in range(len(segments)) for runs in by_rank], dim)
