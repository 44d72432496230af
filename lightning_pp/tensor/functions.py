"""Moves of tensors at the edges of sharded regions, in conjugate pairs as in Megatron-LM (Shoeybi et al., 2019).

What each does in forward, and in backward:

* ``"keep"``, ``"sum"``: nothing; a sum over the ranks;
* ``"sum"``, ``"keep"``: a sum over the ranks; nothing;
* ``"scatter"``, ``"join"``: a sum of which each rank gets its part; parts are joined;
* ``"join"``, ``"scatter"``: parts are joined; each rank takes its part of the sum over the ranks;
* ``"join"``, ``"take"``: parts are joined; each rank takes its part of what all have;
* ``"take"``, ``"join"``: each rank takes its part; parts are joined.

Tensors without data (fakes and meta tensors) are not communicated: a function only has the right shape then. It tells
a :class:`PlannedGroup` what it would communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.split._torch_private import FakeTensor
from lightning_pp.tensor.aside import Collective, aside
from lightning_pp.tensor.parts import TensorPart, joined, part_of, rank_pieces


class PlannedGroup:
    """Stands for a group whose processes do not exist yet; this process is its first rank.

    Args:
        size: Its number of ranks.

    Attributes:
        on_communication: Called for each communication with the bytes of the whole tensor, and how often these
            go round in forward and in backward: twice for a sum, once for joined or scattered tensors.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.on_communication: Callable[[int, int, int], None] = lambda num_bytes, forward, backward: None

    def size(self) -> int:
        """Its number of ranks."""
        return self._size

    def rank(self) -> int:
        """The place of this rank in it."""
        return 0


class RecordedGroup:
    """Stands for ``group`` while functions are recorded for a graph.

    Args:
        group: The ranks.
        record: Called with a tensor and what :class:`Moved` is to do with it, for the result.
    """

    def __init__(self, group: dist.ProcessGroup, record: Callable[..., Tensor]) -> None:
        self.size, self.rank, self.record = group.size, group.rank, record


GROUPS: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()
"""Groups by name, for compiled code."""


Run = Callable[[Collective], Collective]  # gives the way in which a collective is run


def _alone(collective: Collective) -> Collective:
    return collective


def _has_no_data(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _sum(partial: Tensor, dim: int, segments: Sequence[int], group: Any, run: Run = _alone) -> Tensor:
    if _has_no_data(partial):
        return partial
    total = partial.clone(memory_format=torch.contiguous_format)
    run(dist.all_reduce)(total, group=group)
    return total


def _join(part: Tensor, dim: int, segments: Sequence[int], group: Any, run: Run = _alone) -> Tensor:
    if _has_no_data(part):
        return part.new_empty([*part.shape[:dim], sum(segments), *part.shape[dim + 1 :]])
    return joined(part, dim, segments, group, run(dist.all_gather))


def _take(whole: Tensor, dim: int, segments: Sequence[int], group: Any, run: Run = _alone) -> Tensor:
    return part_of(whole, TensorPart(dim, whole.shape, rank_pieces(segments, group.rank(), group.size())))


def _scatter(partial: Tensor, dim: int, segments: Sequence[int], group: Any, run: Run = _alone) -> Tensor:
    """This rank's part of the sum, in one run of ``dim``."""
    parts = partial.chunk(group.size(), dim)
    if _has_no_data(partial):
        return parts[0].clone()
    mine = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    run(dist.reduce_scatter)(mine, [each.contiguous() for each in parts], group=group)
    return mine


_MOVES: Mapping[str, Callable[..., Tensor]] = {"sum": _sum, "join": _join, "take": _take, "scatter": _scatter}

_NAME = "lightning_pp::move_over_ranks"
_SCHEMA = "(Tensor tensor, str how, int dim, int[] segments, str group) -> Tensor"


@torch.library.custom_op(_NAME, mutates_args=(), schema=_SCHEMA)
def _move_compiled(tensor: Tensor, how: str, dim: int, segments: Sequence[int], group: str) -> Tensor:
    """The operation that compiled code has for a move. In a backward, weight gradients of later units run beside it."""
    return _MOVES[how](tensor, dim, segments, GROUPS[group], aside).contiguous()


@_move_compiled.register_fake
def _shape_of_move(tensor: Tensor, how: str, dim: int, segments: Sequence[int], group: str) -> Tensor:
    return tensor.new_empty(_MOVES[how](tensor, dim, segments, GROUPS[group]).shape)


def _move(tensor: Tensor, how: str, dim: int, segments: Sequence[int], group: Any, run: Run = _alone) -> Tensor:
    if how == "keep":
        return tensor.view_as(tensor)
    if torch.compiler.is_compiling():
        moved: Tensor = _move_compiled(tensor, how, dim, segments, group)
        return moved
    return _MOVES[how](tensor, dim, segments, GROUPS[group] if isinstance(group, str) else group, run)


class Moved(torch.autograd.Function):
    """A move of a tensor, and another one of its gradient. The group is of processes, or a name in :data:`GROUPS`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, there: str, back: str, dim: int, segments: Sequence[int], group: Any
    ) -> Tensor:
        """Moves ``tensor``."""
        ctx.back, ctx.dim, ctx.segments, ctx.group = back, dim, segments, group
        return _move(tensor, there, dim, segments, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Moves the gradient."""
        (grad,) = grad_outputs
        return _move(grad, ctx.back, ctx.dim, ctx.segments, ctx.group, aside), None, None, None, None, None


# how often the bytes of the whole tensor go round
_ROUNDS: Mapping[str, int] = {"keep": 0, "take": 0, "join": 1, "scatter": 1, "sum": 2}


def move(tensor: Tensor, there: str, back: str, group: Any, dim: int = 0, segments: Sequence[int] = ()) -> Tensor:
    """:class:`Moved`, applied or recorded.

    Args:
        tensor: A whole tensor, a part, or what each rank adds to a sum.
        there: The move.
        back: That of the gradient.
        group: The ranks, or what stands for them.
        dim: The dimension that is cut or is to be cut, if there is one.
        segments: Its segments, in whole sizes. One, unless parts are joined or taken.
    """
    if isinstance(group, PlannedGroup):
        num_bytes = tensor.numel() * tensor.element_size() * (group.size() if there == "join" else 1)
        needs_gradient = torch.is_grad_enabled() and tensor.requires_grad
        group.on_communication(num_bytes, _ROUNDS[there], _ROUNDS[back] if needs_gradient else 0)
    if isinstance(group, RecordedGroup):
        return group.record(tensor, there, back, dim, segments)
    moved: Tensor = Moved.apply(tensor, there, back, dim, segments, group)  # type: ignore[no-untyped-call]
    return moved
