"""Makes losses that are means over a microbatch count as the mean of the global batch does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pp.split.mean_losses import MeanLosses
from lightning_pp.split.microbatch import Microbatch
from lightning_pp.split.plan import StepPlan
from lightning_pp.strategy.control import ControlGroups
from lightning_pp.strategy.dry_steps import loggers_muted
from lightning_pp.strategy.logs import StepLogs
from lightning_pp.strategy.metrics import PipelineMetrics


@dataclass(frozen=True)
class BatchMeans:
    """The weights of one batch's losses; the last stage uses them, from its first loss on.

    Attributes:
        losses: Corrects the losses that are means of something else than samples.
        loss_weights: For each microbatch, its share in the samples of the global batch times the number of replicas,
            times what the caller asked for: the weights whose mean over replicas is the global batch's mean.
        know_other_replicas: Waits for the other replicas, the first time, and sets both right.
    """

    losses: MeanLosses
    loss_weights: list[float]
    know_other_replicas: Callable[[], None]


class GlobalMeans:
    """Counts, on the last stage, what losses that are means divide by, over microbatches and replicas.

    Args:
        module: The user's module.
        units: Its units.
        groups: Joins the replicas.
        metrics: Left alone while counting.
        device: Where this rank computes.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        units: Mapping[str, nn.Module],
        groups: ControlGroups,
        metrics: PipelineMetrics,
        device: torch.device,
    ) -> None:
        self._module = module
        self._units = units
        self._groups = groups
        self._metrics = metrics
        self._device = device

    def of_batch(
        self,
        microbatches: Sequence[Microbatch],
        plans: Sequence[StepPlan],
        call_step: Callable[[Any], Any],
        seeds: Sequence[Callable[[int], None]],
        factor: float,
    ) -> BatchMeans:
        """Starts counting for one batch; runs the code of the step after the last unit where that is needed.

        Args:
            microbatches: The batch.
            plans: The plan of each.
            call_step: Runs the user's step on the data of one.
            seeds: For each, what seeds the generators for the glue after a unit call.
            factor: What all weights are multiplied by.
        """
        weights = [microbatch.weight for microbatch in microbatches]
        losses = MeanLosses(weights)
        loss_weights = [weight * factor for weight in weights]
        num_replicas = self._groups.num_replicas
        if not self._groups.is_last_stage:
            return BatchMeans(losses, loss_weights, _nothing)
        if (len(microbatches) > 1 or num_replicas > 1) and any(plan.record.num_mean_losses for plan in plans):
            for index, (microbatch, plan) in enumerate(zip(microbatches, plans, strict=True)):
                with ExitStack() as stack:
                    stack.enter_context(StepLogs().of_step(self._module, None))
                    stack.enter_context(self._metrics.suspended())
                    stack.enter_context(loggers_muted(self._module._trainer))
                    step = partial(call_step, microbatch.data)
                    losses.count(index, plan, self._units, step, self._module, self._device, seeds[index])
        if num_replicas == 1:
            return BatchMeans(losses, loss_weights, _nothing)
        samples = sum(microbatch.num_samples for microbatch in microbatches)
        gather = self._groups.start_gather((samples, losses.totals()))
        gathered: list[tuple[int, list[float | None]]] = []

        def know_other_replicas() -> None:
            if gathered:
                return
            gathered.extend(gather())
            num_samples = sum(samples for samples, _ in gathered)
            shares = [microbatch.num_samples / num_samples for microbatch in microbatches]
            per_loss = list(zip(*(totals for _, totals in gathered), strict=False))
            losses.use_totals_of_all_replicas([None if None in totals else sum(totals) for totals in per_loss], shares)
            loss_weights[:] = [share * num_replicas * factor for share in shares]

        return BatchMeans(losses, loss_weights, know_other_replicas)


def _nothing() -> None:
    pass
