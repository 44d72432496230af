"""A batch whose step ends once, on the whole batch (``whole_batch_loss``): that run, and those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.record.step_record import StepRecord

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


def in_one_piece(batch: Any, microbatches: Sequence[Microbatch]) -> Microbatch:
    """The batch as one microbatch."""
    return Microbatch(batch, sum(microbatch.num_samples for microbatch in microbatches), 1.0)
