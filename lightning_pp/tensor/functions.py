"""The two conjugate functions at the edges of sharded regions, as in Megatron-LM (Shoeybi et al., 2019).

Tensors without data (fakes and meta tensors) are not communicated: neither function changes a shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.split._torch_private import FakeTensor


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of ``group``, in memory of its own."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
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
        return (grad if isinstance(grad, FakeTensor) or grad.is_meta else _summed(grad, ctx.group)), None


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


def copy_to_region(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``whole``, for use in code that computes a part on each rank."""
    if not (torch.is_grad_enabled() and whole.requires_grad):
        return whole
    copied: Tensor = CopyToRegion.apply(whole, group)  # type: ignore[no-untyped-call]
    return copied


def sum_of_region(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of ``group`` of what each has computed."""
    if isinstance(partial, FakeTensor) or partial.is_meta:
        return partial
    total: Tensor = SumOfRegion.apply(partial, group)  # type: ignore[no-untyped-call]
    return total
