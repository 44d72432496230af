"""Where a tensor is cut over the tensor axis, also after code splits or reshapes it.

A cut dimension is made of segments, one after another, and each rank holds its even share of every segment, joined in
order. An output of a fused query, key and value projection has three segments. Sizes here are those of whole tensors
unless a name says local.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_pp.errors import SplitError


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut.

    Args:
        dim: The dimension.
        segments: Lengths that add up to the size of the whole dimension; each is cut evenly.
        origins: The parameters whose products made it so.
        tokens: Whether it is a cut along the sequence or the batch, made by ``sequence_parallel``. Such a tensor is
            gathered where a function cannot be computed on parts.
    """

    dim: int
    segments: tuple[int, ...]
    origins: frozenset[str]
    tokens: bool = False

    @property
    def size(self) -> int:
        """Size of the whole dimension."""
        return sum(self.segments)

    def at(self, dim: int, segments: Sequence[int] | None = None) -> Cut:
        """The same cut at another dimension, or of other segments."""
        return Cut(dim, self.segments if segments is None else tuple(segments), self.origins, self.tokens)


class CutError(SplitError):
    """A function cannot be computed on the part of a tensor that one rank holds.

    Args:
        message: What was called, with sizes.
        origins: The parameters whose cut reached it.
        segments: Fractions of the dimension at which a cut of several segments would avoid this; empty if unknown.
    """

    def __init__(self, message: str, origins: frozenset[str], segments: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.origins = origins
        self.segments = segments
        self.name = ""  # of the function, once known

    def __str__(self) -> str:
        return f"{self.name} {super().__str__()}" if self.name else super().__str__()


_ATTRIBUTE = "_tensor_cut"


def cut_of(value: object) -> Cut | None:
    """How ``value`` is cut; None for a whole tensor and for anything else."""
    return getattr(value, _ATTRIBUTE, None)


def mark(tensor: Tensor, cut: Cut | None) -> Tensor:
    """Notes how ``tensor`` is cut."""
    setattr(tensor, _ATTRIBUTE, cut)
    return tensor


def whole_shape(tensor: Tensor) -> list[int]:
    """The shape of the whole tensor."""
    shape = list(tensor.shape)
    cut = cut_of(tensor)
    if cut is not None:
        shape[cut.dim] = cut.size
    return shape


def taken(cut: Cut, start: int, stop: int, num_ranks: int) -> tuple[int, Cut]:
    """The local start and the cut of ``[start, stop)`` of a cut dimension.

    Raises:
        CutError: It does not start and end where segments do.
    """
    ends = [0]
    for length in cut.segments:
        ends.append(ends[-1] + length)
    if start not in ends or stop not in ends or start == stop:
        fractions = tuple(sorted({(bound, cut.size) for bound in (0, start, stop, cut.size)}))
        raise CutError(f"takes [{start}, {stop}) of a sharded dimension of {cut.size}", cut.origins, fractions)
    first, last = ends.index(start), ends.index(stop)
    return start // num_ranks, cut.at(cut.dim, cut.segments[first:last])


def reshaped(cut: Cut, before: Sequence[int], after: Sequence[int], num_ranks: int) -> Cut:
    """The cut after a reshape of whole sizes ``before`` to ``after``.

    Raises:
        CutError: A rank's part is no rectangle of the new shape.
    """
    start, stop, first, last = _group(cut.dim, before, after)
    outer, inner = math.prod(before[start : cut.dim]), math.prod(before[cut.dim + 1 : stop])
    flat = [length * inner for length in cut.segments] * outer
    for dim in range(first, last):
        rest = math.prod(after[dim + 1 : last])
        period = _period(flat, after[dim])
        if period is not None:
            flat = period
        elif all(length % (rest * num_ranks) == 0 for length in flat):
            return cut.at(dim, [length // rest for length in flat])
        else:
            break
    fractions = tuple((i, after[first]) for i in range(after[first] + 1)) if outer == 1 else ()
    raise CutError(
        f"reshapes {list(before)} to {list(after)}, where dimension {cut.dim} is sharded in {num_ranks} "
        f"(segments {list(cut.segments)})",
        cut.origins,
        fractions,
    )


def _group(dim: int, before: Sequence[int], after: Sequence[int]) -> tuple[int, int, int, int]:
    """The dimensions ``[start, stop)`` before and ``[first, last)`` after that ``dim`` is reshaped among."""
    # empty tensors are cut as those of one row
    before, after = [size or 1 for size in before], [size or 1 for size in after]
    i = j = 0
    while True:
        start, first = i, j
        left, right = before[i], after[j] if j < len(after) else 1
        i, j = i + 1, min(j + 1, len(after))
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        if dim < i:
            return start, i, first, j


def _period(flat: list[int], count: int) -> list[int] | None:
    """The segments of one of ``count`` equal stretches of ``flat``; None if a segment lies in two or they differ."""
    if count == 1:
        return flat
    if len(flat) % count:
        return None
    num = len(flat) // count
    return flat[:num] if flat == flat[:num] * count else None
