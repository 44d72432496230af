"""The conjugate functions at the edges of sharded regions, as in Megatron-LM (Shoeybi et al., 2019).

What each does in forward, and in backward:

* :func:`copy_to_region`: nothing; a sum over the ranks;
* :func:`sum_of_region`: a sum over the ranks; nothing;
* :func:`scattered_sum`: a sum of which each rank gets its part; parts are joined;
* :func:`gathered`: parts are joined; each rank takes its part, of the sum over the ranks or of what all have;
* :func:`taken_part`: each rank takes its part; parts are joined.

Tensors without data (fakes and meta tensors) are not communicated: a function only has the right shape then. It tells
a :class:`PlannedGroup` what it would communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.split._torch_private import FakeTensor
from lightning_pp.tensor.aside import Collective, aside
from lightning_pp.tensor.parts import TensorPart, joined, part_of, pieces_of


class PlannedGroup:
    """Stands for a group of processes that there are not yet, of which this is the first.

    Args:
        size: Its number of ranks.

    Attributes:
        tell: Called for each communication with the bytes of the whole tensor, and how often these go round in forward
            and in backward: twice for a sum, once for what is joined or scattered.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.tell: Callable[[int, int, int], None] = lambda num_bytes, forward, backward: None

    def size(self) -> int:
        """Its number of ranks."""
        return self._size

    def rank(self) -> int:
        """The place of this rank in it."""
        return 0


def _tell(group: Any, tensor: Tensor, forward: int, backward: int, times: int = 1) -> None:
    if isinstance(group, PlannedGroup):
        needs_gradient = torch.is_grad_enabled() and tensor.requires_grad
        group.tell(times * tensor.numel() * tensor.element_size(), forward, backward if needs_gradient else 0)


def _summed(tensor: Tensor, group: dist.ProcessGroup, reduce: Collective = dist.all_reduce) -> Tensor:
    """The sum over the ranks of ``group``, in memory of its own."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    reduce(total, group=group)
    return total


class CopyToRegion(torch.autograd.Function):
    """Identity in forward; in backward the gradients of all tensor ranks are summed."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Passes ``whole`` on."""
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Sums the gradients."""
        (grad,) = grad_outputs
        return (grad if _has_no_data(grad) else _summed(grad, ctx.group, aside(dist.all_reduce))), None


class SumOfRegion(torch.autograd.Function):
    """The sum of the partial results of all tensor ranks; in backward the identity."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sums."""
        return _summed(partial, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Passes the gradient on, which is the same on all ranks."""
        return grad_outputs[0], None


def _has_no_data(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _join(part: Tensor, dim: int, segments: Sequence[int], group: Any, gather: Any = dist.all_gather) -> Tensor:
    if _has_no_data(part):
        return part.new_empty([*part.shape[:dim], sum(segments), *part.shape[dim + 1 :]])
    return joined(part, dim, segments, group, gather)


def _take(whole: Tensor, dim: int, segments: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    return part_of(whole, TensorPart(dim, whole.shape, pieces_of(segments, group.rank(), group.size())))


def _scatter_sum(partial: Tensor, dim: int, group: Any, scatter: Collective = dist.reduce_scatter) -> Tensor:
    """This rank's part of the sum, in one run of ``dim``."""
    parts = partial.chunk(group.size(), dim)
    if _has_no_data(partial):
        return parts[0].clone()
    mine = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    scatter(mine, [each.contiguous() for each in parts], group=group)
    return mine


class ScatteredSum(torch.autograd.Function):
    """This rank's part of the sum of partial results; in backward the parts are joined."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, dim: int, segments: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        """Sums and scatters."""
        ctx.where = dim, segments, group
        return _scatter_sum(partial, dim, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Joins."""
        dim, segments, group = ctx.where
        return _join(grad_outputs[0], dim, segments, group, aside(dist.all_gather)), None, None, None


class Gathered(torch.autograd.Function):
    """All ranks' parts joined; in backward this rank's part of the gradient, or of its sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, segments: Sequence[int], group: Any, sums: bool) -> Tensor:
        """Joins."""
        ctx.where, ctx.sums = (dim, segments, group), sums
        return _join(part, dim, segments, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Takes a part."""
        (grad,), (dim, segments, group) = grad_outputs, ctx.where
        if not ctx.sums:
            return _take(grad, dim, segments, group), None, None, None, None
        return _scatter_sum(grad, dim, group, aside(dist.reduce_scatter)), None, None, None, None


class TakenPart(ScatteredSum):
    """This rank's part of what all have; in backward the parts are joined."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, segments: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        """Takes the part."""
        ctx.where = dim, segments, group
        return _take(whole, dim, segments, group)


def copy_to_region(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``whole``, for use in code that computes a part on each rank."""
    if not (torch.is_grad_enabled() and whole.requires_grad):
        return whole
    _tell(group, whole, 0, 2)
    copied: Tensor = CopyToRegion.apply(whole, group)  # type: ignore[no-untyped-call]
    return copied


def sum_of_region(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of ``group`` of what each has computed."""
    _tell(group, partial, 2, 0)
    if _has_no_data(partial):
        return partial
    total: Tensor = SumOfRegion.apply(partial, group)  # type: ignore[no-untyped-call]
    return total


def scattered_sum(partial: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, in ``dim``, of the sum over the ranks of ``group``."""
    _tell(group, partial, 1, 1)
    part: Tensor = ScatteredSum.apply(partial, dim, [partial.shape[dim]], group)  # type: ignore[no-untyped-call]
    return part


def gathered(part: Tensor, dim: int, segments: Sequence[int], group: dist.ProcessGroup, *, sums: bool) -> Tensor:
    """All ranks' parts joined in ``dim``.

    Args:
        part: This rank's.
        dim: The dimension that is cut, in ``segments``.
        segments: One segment if ``sums``.
        group: The ranks.
        sums: Whether each rank's gradient is a part of a sum, as of what is multiplied by a rank's own columns.
    """
    _tell(group, part, 1, int(sums), group.size())
    whole: Tensor = Gathered.apply(part, dim, segments, group, sums)  # type: ignore[no-untyped-call]
    return whole


def taken_part(whole: Tensor, dim: int, segments: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a whole tensor."""
    _tell(group, whole, 0, 1)
    part: Tensor = TakenPart.apply(whole, dim, segments, group)  # type: ignore[no-untyped-call]
    return part
