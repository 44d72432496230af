"""A batch whose step ends once, on all of it (``whole_batch_loss``): its plans, and what surrounds its runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from lightning_pp.runtime.whole_batch import WholeBatch
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.record.whole_batch import WholeBatchPlan, plan_whole_batch
from lightning_pp.strategy.batch.scopes import StepScopes

END_OF_BATCH = -1
"""In the place of a microbatch's index: the run of the step on the whole batch."""
_MOST_PLANS = 256


class WholeBatchPlans:
    """The plans of whole batches, by those of their microbatches."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[int, ...], tuple[list[StepPlan], WholeBatchPlan]] = OrderedDict()

    def of(self, whole: StepPlan, parts: Sequence[StepPlan], microbatches: Sequence[Microbatch]) -> WholeBatchPlan:
        """The plan of a batch.

        Args:
            whole: The plan of a step on all of it.
            parts: Those of steps on its microbatches.
            microbatches: The microbatches.

        Raises:
            SplitError: As :func:`plan_whole_batch` says.
        """
        num_samples = tuple(microbatch.num_samples for microbatch in microbatches)
        key = (id(whole), *map(id, parts), *num_samples)
        if key not in self._plans:
            # the plans are kept with what came of them, so that their ids stay theirs
            self._plans[key] = [whole, *parts], plan_whole_batch(whole, parts, num_samples)
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        return self._plans[key][1]


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


def work_of(plan: WholeBatchPlan, call_step: Callable[[], Any], scopes: WholeBatchScopes, factor: float) -> WholeBatch:
    """What the executor does at the end of the batch; ``call_step`` runs the user's step on all of it."""
    return WholeBatch(plan, lambda: scopes.run_tail(call_step), factor)
