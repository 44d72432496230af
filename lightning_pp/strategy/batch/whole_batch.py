"""A batch whose step ends once, on all of it (``whole_batch_loss``): what surrounds its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.strategy.batch.scopes import StepScopes

END_OF_BATCH = -1
"""In the place of a microbatch's index: the run of the step on the whole batch."""


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


class WholeBatchScopes(StepScopes):
    """No microbatch's run of the step logs or changes anything; that on the whole batch does.

    The arguments are those of :class:`StepScopes`.
    """

    ends_each_microbatch = False

    def run(self, step: Callable[[], Any], microbatch: int, stage: int) -> Any:
        """Runs the user's step for one microbatch and stage, up to its last unit."""
        return self._run(step, microbatch, is_last=False)

    def run_tail(self, step: Callable[[], Any]) -> Any:
        """Runs it on the whole batch."""
        return self._run(step, 0, is_last=True)
