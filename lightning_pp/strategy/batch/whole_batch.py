"""A batch whose step ends once, on the whole batch (``whole_batch_loss``): that run, and those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision

from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.strategy.step.dry_steps import recorded_step

END_OF_BATCH = -1
"""As the index of a microbatch: the run of the step on the whole batch."""


def ending_with_batch(step: Callable[[DryRun], Any], end: StepRecord | None = None) -> Callable[[DryRun], Any]:
    """``step`` on a microbatch, for a dry run: its end runs on the whole batch only, and may fail on a few samples.

    Args:
        step: The step.
        end: A dry run on the whole batch, if there has been one.
    """

    def run(dry: DryRun) -> Any:
        dry.end_may_fail, dry.end_of_batch = True, end
        return step(dry)

    return run


def first_step(
    module: pl.LightningModule,
    step: str,
    data: Any,
    arguments: Sequence[Any],
    precision: Precision,
    options: PipelineOptions,
) -> Callable[[DryRun], Any]:
    """The step on a microbatch, for the dry run that the model is cut by."""
    run = recorded_step(module, step, data, arguments, precision=precision, trains=step == "training_step")
    return ending_with_batch(run) if options.schedule.whole_batch_loss and step != "predict_step" else run


def in_one_piece(batch: Any, microbatches: Sequence[Microbatch]) -> Microbatch:
    """The batch as one microbatch."""
    return Microbatch(batch, sum(microbatch.num_samples for microbatch in microbatches), 1.0)
