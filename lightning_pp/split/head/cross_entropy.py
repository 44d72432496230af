"""The cross entropy of a projection whose classes come in parts, one after the other.

What goes from part to part is a few numbers for each row: the logarithm of the sum of the exponentials so far, and the
target's logit. This is the running softmax of Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018), in the form of logarithms.

Shape letters: N rows (tokens), V classes (words), P classes of a part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class RunningSums(NamedTuple):
    """The sums of each row after some of its classes.

    Attributes:
        log_sum_exp: The logarithm of the sum of the exponentials of their logits, [N].
        at_target: The target's logit if it is among them, else 0, [N].
        total: The sum of their logits, [N]; None where labels are not smoothed.
    """

    log_sum_exp: Tensor
    at_target: Tensor
    total: Tensor | None = None


def sums_dtype(logits: torch.dtype) -> torch.dtype:
    """The dtype in which sums over logits of that dtype are kept: at least float32."""
    return torch.promote_types(logits, torch.float32)


def sums_of_part(logits: Tensor, target: Tensor, first_class: int, *, with_total: bool) -> RunningSums:
    """The sums over the classes ``first_class``, ``first_class + 1``, ... of each row.

    Between forward and backward it keeps ``logits`` as they are.

    Args:
        logits: Of these classes, floating point, [N, P].
        target: The class of each row, int64, [N]; rows of any other class have nothing at their target.
        first_class: Number of the first class.
        with_total: Whether the sum of the logits is needed.

    Returns:
        In float32, or in float64 for such logits.
    """
    log_sum_exp, at_target, total = _SumsOfPart.apply(  # type: ignore[no-untyped-call]
        logits, target - first_class, with_total
    )
    return RunningSums(log_sum_exp, at_target, total if with_total else None)


def joined(before: RunningSums | None, sums: RunningSums) -> RunningSums:
    """The sums over the classes of both; ``before`` is None in the first part."""
    if before is None:
        return sums
    total = None if sums.total is None or before.total is None else before.total + sums.total
    return RunningSums(torch.logaddexp(before.log_sum_exp, sums.log_sum_exp), before.at_target + sums.at_target, total)


class Loss(NamedTuple):
    """The options of a cross entropy, as in :func:`torch.nn.functional.cross_entropy`.

    Attributes:
        ignore_index: Rows of this class count nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``.
        label_smoothing: In [0, 1].
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


def check_classes(target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises :class:`IndexError` for a class that is not there; on a device it is the device that stops."""
    counted = torch.where(target == ignore_index, 0, target)
    torch.zeros(num_classes, dtype=torch.uint8, device=target.device).index_select(0, counted.flatten())


def loss_of(sums: RunningSums, target: Tensor, num_classes: int, loss: Loss) -> Tensor:
    """The loss of rows all of whose classes have been seen.

    Args:
        sums: Over all classes, [N].
        target: The class of each row, int64, [N].
        num_classes: How many classes there are.
        loss: What is asked for.

    Returns:
        [N] without a reduction, else a number; in the dtype of the sums.
    """
    rows = sums.log_sum_exp - sums.at_target
    if sums.total is not None:
        smooth = sums.log_sum_exp - sums.total / num_classes
        rows = (1 - loss.label_smoothing) * rows + loss.label_smoothing * smooth
    is_counted = target != loss.ignore_index
    rows = torch.where(is_counted, rows, 0.0)
    if loss.reduction == "none":
        return rows
    return rows.sum() if loss.reduction == "sum" else rows.sum() / is_counted.sum()


class _SumsOfPart(Function):
    """The sums of a part, with one matrix written in backward: the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, place: Tensor, with_total: bool) -> tuple[Tensor, Tensor, Tensor]:
        num_classes = logits.shape[1]
        wide = logits.to(sums_dtype(logits.dtype))
        is_here = (place >= 0) & (place < num_classes)
        place = place.clamp(0, num_classes - 1).unsqueeze(1)
        log_sum_exp = torch.logsumexp(wide, 1)
        at_target = torch.where(is_here, wide.gather(1, place).squeeze(1), 0.0)
        total = wide.sum(1) if with_total else log_sum_exp.new_zeros(())
        ctx.save_for_backward(logits, log_sum_exp, place, is_here)
        ctx.with_total = with_total
        return log_sum_exp, at_target, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_sum: Tensor, of_target: Tensor, of_total: Tensor) -> tuple[Tensor, None, None]:
        logits, log_sum_exp, place, is_here = ctx.saved_tensors
        # a row without a finite logit here has a sum of -inf, and no share in the softmax
        known = log_sum_exp.clamp(min=torch.finfo(log_sum_exp.dtype).min)
        gradient = (logits.to(log_sum_exp.dtype) - known.unsqueeze(1)).exp_().mul_(of_sum.unsqueeze(1))
        gradient.scatter_add_(1, place, torch.where(is_here, of_target, 0.0).unsqueeze(1))
        if ctx.with_total:
            gradient += of_total.unsqueeze(1)
        return gradient.to(logits.dtype), None, None
