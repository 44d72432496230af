"""Losses that are means: what makes the microbatches' means add up to the batch's.

A batch's mean loss is the weighted mean of its microbatches' if each weighs as what its mean divides by: for most
losses the samples, which is how microbatches are weighted anyway; for a cross entropy with ``ignore_index`` (padded
text) or class weights something else, and for a loss over masked-out elements again. So the last stage counts, before
the first microbatch is due, what each mean loss divides by: it runs the step of every microbatch with all units
standing in, which costs only the code between them, and falls into the time in which it waits for its first input.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pp.split.interception import running_unit
from lightning_pp.split.placeholders import is_fake
from lightning_pp.split.plan import StepPlan
from lightning_pp.split.rehearsal import Rehearsed, rehearse

Denominator = Tensor | float | None
# Given what the loss divides by (None: unknown), and how to call it with another reduction.
_OnMeanLoss = Callable[[Denominator, Callable[..., Tensor]], Tensor]

_BY_TARGET = ("cross_entropy", "nll_loss")
_BY_ELEMENT = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
    "poisson_nll_loss",
)


class MeanLosses:
    """The mean losses of one batch.

    Args:
        weights: Share of each microbatch in the batch's samples; what its loss is going to be multiplied by.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._counts: dict[int, list[Denominator]] = {}
        self._totals: list[Denominator] | None = None

    def count(
        self,
        microbatch: int,
        plan: StepPlan,
        units: Mapping[str, nn.Module],
        step: Callable[[], Any],
        module: nn.Module,
        device: torch.device,
        seed_glue: Callable[[int], None],
    ) -> None:
        """Rehearses ``step`` of a microbatch, up to its last mean loss; see :func:`rehearse` for the arguments."""
        counted: list[Denominator] = []

        def note(denominator: Denominator, loss: Callable[..., Tensor]) -> Tensor:
            counted.append(denominator)
            if len(counted) == plan.record.num_mean_losses:
                raise Rehearsed
            return loss()

        with intercepted_mean_losses(note):
            _, failure = rehearse(plan.record, units, step, module, device, seed_glue)
        if failure is not None:  # what it made of made-up values says nothing; the real step will tell
            counted.clear()
        self._counts[microbatch] = counted

    @property
    def are_corrected(self) -> bool:
        """Whether :meth:`corrected` has anything to do."""
        return bool(self._batch_totals())

    @contextmanager
    def corrected(self, microbatch: int) -> Iterator[None]:
        """Within the step of ``microbatch``, mean losses give their share of the batch's mean.

        The n-th becomes its sum over what it divides by in the whole batch, over the microbatch's weight.
        """
        remaining = iter(self._batch_totals())

        def correct(denominator: Denominator, loss: Callable[..., Tensor]) -> Tensor:
            total = next(remaining, None)
            if total is None or denominator is None:
                return loss()
            return loss(reduction="sum") / (total * self._weights[microbatch])

        with intercepted_mean_losses(correct):
            yield

    def totals(self) -> list[float | None]:
        """What each mean loss of this replica's batch divides by; waits for the device."""
        return [None if total is None else float(total) for total in self._batch_totals()]

    def use_totals_of_all_replicas(self, totals: Sequence[float | None], weights: Sequence[float]) -> None:
        """Makes the global batch's mean come out, instead of this replica's.

        Args:
            totals: The sums of all replicas' :meth:`totals`.
            weights: Share of each microbatch in the samples of the global batch.
        """
        self._totals = list(totals)
        self._weights = weights

    def _batch_totals(self) -> list[Denominator]:
        if self._totals is None:
            per_microbatch = list(self._counts.values())
            self._totals = []
            if per_microbatch and len({len(counts) for counts in per_microbatch}) == 1:
                for counts in zip(*per_microbatch, strict=True):
                    known = [count for count in counts if count is not None]
                    self._totals.append(sum(known) if len(known) == len(counts) else None)
        return self._totals


@contextmanager
def intercepted_mean_losses(on_mean_loss: _OnMeanLoss) -> Iterator[None]:
    """Within, functions of ``torch.nn.functional`` that take a mean outside units go to ``on_mean_loss``."""
    originals = {name: getattr(F, name) for name in (*_BY_TARGET, *_BY_ELEMENT)}
    nested = False

    def intercept(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal nested
            if nested or running_unit() or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            given = arguments.arguments
            if (
                given["reduction"] not in ("mean", "batchmean")
                or given.get("size_average") is not None
                or given.get("reduce") is not None
            ):
                return original(*args, **kwargs)

            def loss(reduction: str = given["reduction"]) -> Tensor:
                nonlocal nested
                nested = True
                try:
                    return (
                        original(*arguments.args, **{**arguments.kwargs, "reduction": reduction})
                        if ("reduction" in arguments.kwargs)
                        else original(**{**given, "reduction": reduction})
                    )
                finally:
                    nested = False

            return on_mean_loss(_denominator(name, given), loss)

        return call

    for name, original in originals.items():
        setattr(F, name, intercept(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


def _denominator(name: str, given: Mapping[str, Any]) -> Denominator:
    """What the mean divides by; None where it depends on weights or is not known."""
    values, target = given["input"], given["target"]
    if name in _BY_TARGET:
        if target.is_floating_point():  # probabilities of classes
            return float(target.numel() / (values.shape[1] if values.dim() > 1 else values.shape[0]))
        weight = given.get("weight")
        if is_fake(target) or (weight is not None and is_fake(weight)):
            return None
        kept: Tensor = target != given["ignore_index"]
        if weight is None:
            return kept.sum()
        counted: Tensor = (weight[torch.where(kept, target, 0)] * kept).sum()
        return counted
    if name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss") and given.get("weight") is not None:
        return None
    if given["reduction"] == "batchmean":
        return float(values.shape[0])
    shape = torch.broadcast_shapes(values.shape, target.shape)  # type: ignore[no-untyped-call]
    return float(math.prod(shape))
