"""Logits of which each tensor rank has some classes, until a cross entropy takes them.

The cross entropy needs a few numbers of each row from every rank, so no rank makes all logits. Any other function gets
all of them, gathered once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_pp.errors import SplitError
from lightning_pp.split.data.tree import map_leaves
from lightning_pp.split.head.cross_entropy import RunningSums, sums_of_part
from lightning_pp.split.head.deferred_logits import DeferredHead, DeferredLogits
from lightning_pp.split.head.parts import Pointwise, applied
from lightning_pp.tensor.functions import move
from lightning_pp.tensor.parts import joined
from lightning_pp.tensor.region import Region

# what says something of the tensor itself, or changes it: a gathered copy cannot stand for it
_OF_THE_TENSOR = frozenset({"retain_grad", "register_hook", "backward", "grad", "data", "__setitem__"})


class _LogSumExpOfRanks(Function):
    """The logarithm of the sum of exponentials over the logits of all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = torch.logsumexp(joined(own.unsqueeze(0), 0, [group.size()], group), 0)
        # a row without a finite logit has a sum of -inf
        ctx.save_for_backward((own - total.clamp(min=torch.finfo(total.dtype).min)).exp_())
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (share,) = ctx.saved_tensors
        return grad_outputs[0] * share, None


@dataclass(frozen=True)
class HeadOfRanks(DeferredHead):
    """One call of a head that is cut along its classes.

    ``hidden`` is this rank's share of the logits.

    Attributes:
        region: Where it was computed.
    """

    region: Region

    def sums(self, target: Tensor, pointwise: Pointwise, with_total: bool) -> RunningSums:
        """By the sums over this rank's classes."""
        logits = applied(pointwise, self.hidden.reshape(-1, self.hidden.shape[-1]))
        own = sums_of_part(logits, target, self.region.first_of([self.num_classes]), with_total=with_total)
        group = self.region.group
        log_sum_exp: Tensor = _LogSumExpOfRanks.apply(own.log_sum_exp, group)  # type: ignore[no-untyped-call]
        total = None if own.total is None else move(own.total, "sum", "keep", group)
        return RunningSums(log_sum_exp, move(own.at_target, "sum", "keep", group), total)

    def used(self, how: str, func: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """On all logits.

        Raises:
            SplitError: It would change the gathered logits, or say something of them alone.
        """
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ("grad_fn", "_base"):  # looked up where units are gathered for backward
            return self.hidden.grad_fn if name == "grad_fn" else None
        edits = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "out" in kwargs
        if func is None or edits or name in _OF_THE_TENSOR or getattr(func, "__module__", "") == "torch.autograd":
            raise SplitError(
                f"{how}, but each tensor rank has the logits of some classes. To leave the head whole, set "
                f"tensor_parallel_plan={{{self.name!r}: 'replicate', '*': 'auto'}}."
            )
        return func(*map_leaves(self._whole, args), **map_leaves(self._whole, kwargs))

    @cached_property
    def _logits(self) -> Tensor:
        return self.region.gathered(self.hidden, sums=False).reshape(-1, self.num_classes)

    def _whole(self, leaf: Any) -> Any:
        if not isinstance(leaf, DeferredLogits):
            return leaf
        logits = applied(leaf.pointwise, self._logits).to(leaf.dtype)
        classes = next(place for place in range(leaf.dim()) if not leaf.rows.stride(place) and leaf.shape[place] != 1)
        rows = leaf.rows.select(classes, 0)
        taken = logits.index_select(0, rows.flatten().to(logits.device)).view(*rows.shape, self.num_classes)
        return taken.movedim(-1, classes)
