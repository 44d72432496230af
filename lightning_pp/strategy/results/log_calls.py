"""One ``self.log`` call as plain data, and merging the calls of several microbatches or replicas into one."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "sum", "min", "max")},
    "avg": "mean",
    **{getattr(torch, name): name for name in ("mean", "sum", "min", "max")},
    sum: "sum",
    min: "min",
    max: "max",
}


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log``, for one microbatch, one replica, or the whole batch.

    Attributes:
        fx: The hook that logged (``training_step``, ...).
        name: The key.
        occurrence: 0 for the first call with this key in a microbatch, 1 for the second, and so on.
        dataloader_idx: Index of the dataloader, None where there is only one.
        options: The further keyword arguments of ``self.log``, resolved as Lightning resolves them; no ``sync_dist``,
            since the value of the whole batch is in sync already.
        metric: Path of the logged :class:`torchmetrics.Metric` in the module; None where a number was logged.
        value: The number; for a metric its value on the batch, None where that is not logged.
        dtype: Of the logged tensor.
        weight: Number of samples that the value stands for.
        batch_size: What the user gave as ``batch_size``, summed; None where Lightning is to find it.
        extreme: ``min`` or ``max`` where the value is that over samples.
        part: Of a number that the logged one is made of: the fingerprint of the formula, and its place in it.
        line: The user's line, where the value is a number of Python; empty for a tensor.
    """

    fx: str
    name: str
    occurrence: int
    dataloader_idx: int | None
    options: dict[str, Any]
    metric: str | None
    value: float | None
    dtype: torch.dtype
    weight: float
    batch_size: float | None
    extreme: str | None = None
    part: tuple[str, int] | None = None
    line: str = ""

    @property
    def key(self) -> tuple[Hashable, ...]:
        return self.fx, self.name, self.dataloader_idx, self.occurrence, self.part

    @property
    def whole_key(self) -> tuple[Hashable, ...]:
        """The key of the logged number that this is a part of."""
        return replace(self, part=None).key

    @property
    def reduction(self) -> str:
        """``mean``, ``sum``, ``min`` or ``max``; a metric's values on microbatches are averaged."""
        return "mean" if self.metric is not None else str(self.options["reduce_fx"])

    @property
    def merging(self) -> str:
        """How values of microbatches or replicas become the batch's: ``mean``, ``min`` or ``max``.

        Also where ``reduce_fx`` is ``sum``: that adds up batches, and each part's value stands for the whole batch.
        """
        if self.extreme is not None:
            return self.extreme
        return self.reduction if self.reduction in ("min", "max") else "mean"

    def value_dtype(self) -> torch.dtype:
        """Dtype of the merged value for Lightning: that of Lightning's own storage, or finer."""
        default = torch.get_default_dtype()
        default = default if default in (torch.float32, torch.float64) else torch.float32
        if self.dtype.is_floating_point:
            return self.dtype if self.metric is not None or self.dtype in (torch.float32, torch.float64) else default
        return default if self.reduction == "mean" or self.dtype is torch.bool else self.dtype


def reduction_name(reduce_fx: str | Callable[..., Any]) -> str:
    """``reduce_fx`` of ``self.log`` as one of ``mean``, ``sum``, ``min``, ``max``.

    Raises:
        MisconfigurationException: It is anything else, as in Lightning.
    """
    key = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    if key not in _REDUCTIONS:
        raise MisconfigurationException(
            "Only `self.log(..., reduce_fx={min,max,mean,sum})` are supported. If you need a custom reduction, please"
            f" log a `torchmetrics.Metric` instance instead. Found: {reduce_fx}"
        )
    return _REDUCTIONS[key]


def merge_calls(parts: Iterable[Sequence[LogCall]], *, by_batch_size: bool = False) -> list[LogCall]:
    """One call per key from those of every microbatch (or of every replica), in the order of their first appearance.

    Means are weighted by samples over the parts that logged the key.

    Args:
        parts: The calls of each microbatch, or of each replica.
        by_batch_size: Where the user gave ``batch_size`` in every part, and different ones, let these weigh in place of
            the samples: they say over how many things each value is a mean. Equal ones (``batch_size=1``) say nothing.

    Raises:
        MisconfigurationException: Two parts disagree on what a key is.
    """
    by_key: dict[tuple[Hashable, ...], list[LogCall]] = {}
    for calls in parts:
        for call in calls:
            by_key.setdefault(call.key, []).append(call)
    return [_merge_key(calls, by_batch_size) for calls in by_key.values()]


def _merge_key(calls: Sequence[LogCall], by_batch_size: bool) -> LogCall:
    first = calls[0]
    kinds = {(call.metric, call.reduction) for call in calls}
    if len(kinds) > 1:
        raise MisconfigurationException(
            f"`self.log({first.name!r}, ...)` in `{first.fx}` differs between the microbatches of one batch: "
            f"{sorted(kinds, key=str)} as (metric, reduce_fx). Log the same kind of value in every microbatch."
        )
    sizes = [call.batch_size for call in calls if call.batch_size is not None]
    all_given = len(sizes) == len(calls)
    weights = sizes if by_batch_size and all_given and len(set(sizes)) > 1 else [call.weight for call in calls]
    known = [(call.value, weight) for call, weight in zip(calls, weights, strict=True) if call.value is not None]
    return replace(
        first,
        value=_reduce(first.merging, known),
        weight=sum(call.weight for call in calls),
        batch_size=sum(sizes) if all_given else None,
    )


def _reduce(reduction: str, weighted: Sequence[tuple[float, float]]) -> float | None:
    """Of pairs of value and weight."""
    if not weighted:
        return None
    if reduction == "mean":
        # a mean over no things at all is 0 / 0, and has no part in the mean over all
        weighted = [pair for pair in weighted if pair[1]] or weighted
    values = [value for value, _ in weighted]
    if any(math.isnan(value) for value in values):
        return math.nan  # as torch.min and torch.max, unlike Python's
    least, greatest = min(values), max(values)
    if reduction == "min" or least == greatest:
        return least  # a constant, such as a learning rate, comes through bit for bit
    if reduction == "max":
        return greatest
    total = sum(weight for _, weight in weighted)
    return sum(weight * value for value, weight in weighted) / (total or math.nan)


def to_tensors(calls: Sequence[LogCall], device: torch.device) -> list[Tensor | None]:
    """The calls' values as 0-d tensors on ``device``, with one transfer per dtype, which waits for nothing there."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for position, call in enumerate(calls):
        if call.value is not None:
            by_dtype.setdefault(call.value_dtype(), []).append(position)
    tensors: list[Tensor | None] = [None] * len(calls)
    for dtype, positions in by_dtype.items():
        row = torch.tensor([calls[position].value for position in positions], dtype=dtype, device="cpu")
        row = row.to(device, non_blocking=True)
        for position, tensor in zip(positions, row.unbind(), strict=True):
            tensors[position] = tensor
    return tensors
