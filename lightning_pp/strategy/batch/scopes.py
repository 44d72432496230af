"""The contexts around the user's step on one rank, for one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision

from lightning_pp.split.comparison.decisions import Decisions
from lightning_pp.split.reductions.scaling import ScaledStep
from lightning_pp.split.unit_calls.compilation import uncompiled_outside_units
from lightning_pp.strategy.batch.scaling import ScaledBatch
from lightning_pp.strategy.results.attributes import StepAttributes
from lightning_pp.strategy.results.logs import StepLogs
from lightning_pp.strategy.results.metrics import PipelineMetrics
from lightning_pp.strategy.step.dry_steps import collectives_refused


@dataclass(eq=False)
class StepScopes:
    """Enters the contexts of a step; those of logs and of collectives once for the whole batch.

    Attributes:
        module: The user's module.
        precision: The precision plugin.
        logs: Records what the last stage's steps log.
        metrics: Are used for real on the last stage only.
        attributes: Those that the steps change.
        scaled: Makes what the last stage's steps compute stand for the whole batch.
        last_stage: Its number.
        decisions: Notes branches by weights; None where the step has none.
        ends_with_batch: Whether only the run on the whole batch runs to the end of the step, and logs and changes
            anything; otherwise that of each microbatch on the last stage.
    """

    module: pl.LightningModule
    precision: Precision
    logs: StepLogs
    metrics: PipelineMetrics
    attributes: StepAttributes
    scaled: ScaledBatch
    last_stage: int
    decisions: Decisions | None = None
    ends_with_batch: bool = False

    def __post_init__(self) -> None:
        self._is_plain = isinstance(self.precision.forward_context(), nullcontext)

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """Around all steps of the batch."""
        with self.logs.installed(self.module), collectives_refused(self.module, "The step"):
            yield

    def run(self, step: Callable[[], Any], microbatch: int, stage: int) -> Any:
        """Runs the user's step for one microbatch and stage; with ``ends_with_batch`` up to its last unit."""
        return self._run(step, microbatch, is_last=stage == self.last_stage and not self.ends_with_batch)

    def run_tail(self, step: Callable[[], Any]) -> Any:
        """Runs it on the whole batch, with ``ends_with_batch``."""
        return self._run(step, 0, is_last=True)

    def _run(self, step: Callable[[], Any], microbatch: int, *, is_last: bool) -> Any:
        scopes: list[AbstractContextManager[Any]] = [self.metrics.step() if is_last else self.metrics.suspended()]
        scaled: ScaledStep | None = None
        if is_last:
            self.scaled.wait_for_replica_counts()
            scaled = self.scaled.step_of(microbatch)
            self.metrics.share = self.scaled.shares[microbatch] if self.scaled.shares else 1.0
        of_whole_batch = None if scaled is None else scaled.of_whole_batch
        if not self._is_plain:
            scopes.append(self.precision.forward_context())
        if self.attributes:
            scopes.append(self.attributes.of_microbatch(microbatch, of_whole_batch, active=is_last))
        if scaled is not None:
            scopes += uncompiled_outside_units(), scaled
        if is_last and self.decisions is not None:
            scopes.append(self.decisions.of_microbatch(microbatch))
        if is_last and self.logs.follows_formulas:
            scopes += uncompiled_outside_units(), self.logs.formulas_followed()
        self.logs.begin(microbatch if is_last else None, of_whole_batch)
        try:
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
