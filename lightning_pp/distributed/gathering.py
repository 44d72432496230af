"""Gathering among the ranks of a group: tensors with gradients, and objects on the first rank.

torch's own (``torch.distributed.nn.functional.all_gather``) takes ranks of the group for global ones in its backward
over gloo, and fails in groups that do not begin at rank 0 (torch 2.13).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def gather(value: T, group: dist.ProcessGroup | None, rank: int) -> list[T] | None:
    """Every rank's value on rank 0, None on the others. Every rank of the pipeline has to call it.

    Args:
        value: This rank's; can be pickled.
        group: The CPU group of the pipeline; None for a pipeline of one rank.
        rank: This rank's place in the pipeline.
    """
    if group is None:
        return [value]
    values: list[Any] | None = [None] * group.size() if rank == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values


def gathered(tensor: Tensor, group: dist.ProcessGroup, *, sync_grads: bool) -> Tensor:
    """The tensors of all ranks of ``group``, shape ``(group size, *tensor.shape)``; every rank has to call it.

    Args:
        tensor: Of one shape and dtype on all ranks.
        group: The ranks.
        sync_grads: Whether a backward gives each rank the sum of all ranks' gradients for its tensor; every rank has to
            run that backward.
    """
    if sync_grads:
        result: Tensor = _Gather.apply(tensor, group)  # type: ignore[no-untyped-call]
        return result
    with torch.no_grad():
        return _stacked(tensor, group)


def _stacked(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(tensors, tensor.contiguous(), group=group)
    return torch.stack(tensors)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _stacked(tensor.detach(), group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        summed = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.group.rank()], None
