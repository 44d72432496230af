"""The contexts around the user's step on one rank, for one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision

from lightning_pp.schedule import Placement
from lightning_pp.split.reductions.scaling import ScaledStep
from lightning_pp.split.unit_calls.compilation import uncompiled_outside_units
from lightning_pp.strategy.batch.scaling import ScaledBatch
from lightning_pp.strategy.results.attributes import StepAttributes
from lightning_pp.strategy.results.logs import StepLogs
from lightning_pp.strategy.results.metrics import PipelineMetrics
from lightning_pp.strategy.step.dry_steps import collectives_refused


@dataclass(eq=False)
class StepScopes:
    """Enters most contexts once for the whole batch, since a step runs once for each microbatch and stage.

    Attributes:
        module: The user's module.
        precision: The precision plugin.
        logs: Records what the last stage's steps log.
        metrics: Are used for real on the last stage only.
        attributes: Those that the steps change.
        scaled: Makes what the last stage's steps compute stand for the whole batch.
        placement: Which stages this rank has.
        rank: Its place in the pipeline.
        ends_with_batch: Whether only the run on the whole batch runs to the end of the step, and logs and changes
            anything; otherwise that of each microbatch on the last stage.
    """

    module: pl.LightningModule
    precision: Precision
    logs: StepLogs
    metrics: PipelineMetrics
    attributes: StepAttributes
    scaled: ScaledBatch
    placement: Placement
    rank: int
    ends_with_batch: bool = False

    def __post_init__(self) -> None:
        self._last_stage = self.placement.num_stages - 1
        stages = self.placement.stages_of_rank(self.rank)
        # whether this rank's runs of the step run to its end; None where some do and some do not
        self._are_last: bool | None = None
        if self._last_stage not in stages:
            self._are_last = False
        elif len(stages) == 1 and not self.ends_with_batch:
            self._are_last = True
        self._is_plain = isinstance(self.precision.forward_context(), nullcontext)

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """Around all steps of the batch."""
        with (
            self.logs.installed(self.module),
            self._metrics_scope(self._are_last),
            collectives_refused(self.module, "The step"),
        ):
            yield

    def run(self, step: Callable[[], Any], microbatch: int, stage: int) -> Any:
        """Runs the user's step for one microbatch and stage; with ``ends_with_batch`` up to its last unit."""
        return self._run(step, microbatch, is_last=stage == self._last_stage and not self.ends_with_batch)

    def run_tail(self, step: Callable[[], Any]) -> Any:
        """Runs it on the whole batch, with ``ends_with_batch``."""
        return self._run(step, 0, is_last=True)

    def _run(self, step: Callable[[], Any], microbatch: int, *, is_last: bool) -> Any:
        scopes: list[AbstractContextManager[Any]] = []
        scaled: ScaledStep | None = None
        if is_last:
            self.scaled.wait_for_replica_counts()
            scaled = self.scaled.step_of(microbatch)
        of_whole_batch = None if scaled is None else scaled.of_whole_batch
        if not self._is_plain:
            scopes.append(self.precision.forward_context())
        if self._are_last is None and self.metrics.are_there:
            scopes.append(self._metrics_scope(is_last))
        if self.attributes.places:
            scopes.append(self.attributes.of_microbatch(microbatch, of_whole_batch, active=is_last))
        if scaled is not None:
            scopes += uncompiled_outside_units(), scaled
        self.logs.begin(microbatch if is_last else None, of_whole_batch)
        try:
            if not scopes:
                return step()
            with ExitStack() as stack:
                for scope in scopes:
                    stack.enter_context(scope)
                output = step()
        finally:
            self.logs.end()
        if scaled is None:
            return output
        self.scaled.check_complete(microbatch, scaled)
        self.scaled.check_loss(output)
        return scaled.of_whole_batch(output)

    def _metrics_scope(self, is_last: bool | None) -> AbstractContextManager[None]:
        if is_last is None:
            return nullcontext()
        return self.metrics.step() if is_last else self.metrics.suspended()
