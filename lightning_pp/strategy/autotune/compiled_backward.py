"""What is left for W where units are compiled: measured in a training's first batches, and told once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.schedule import ActionKind, Schedule
from lightning_pp.strategy.autotune.profiling import NUM_WARM_UP_BATCHES

NUM_MEASURED_BATCHES = 2
"""After those that warm up, in which units are compiled."""

Times = Mapping[int, tuple[float, float]]
"""Stage to milliseconds of I and of W, for one microbatch."""


class CompiledBackward:
    """Tells once what I and W take where the backward of compiled units is split.

    Weight gradients of compiled code are part of its backward, so they are computed in I, and W has what is not
    compiled. Schedules that do not split the backward have no W, and nothing is told.

    Args:
        groups: Joins the ranks of the pipeline.
    """

    def __init__(self, groups: ControlGroups) -> None:
        self._groups = groups
        self._num_batches = 0
        self._timers: list[StepTimer] = []
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether it needs no more times."""
        return self._is_done

    def note(self, schedule: Schedule, timer: StepTimer) -> None:
        """Keeps what the training batch took that has just been run."""
        if self._is_done or not schedule.splits_backward:
            return
        self._num_batches += 1
        if self._num_batches > NUM_WARM_UP_BATCHES:
            self._timers.append(timer)

    def tell(self) -> None:
        """Before a training batch; every rank of the pipeline has to call it. One small gather, once in a training."""
        if self._is_done or len(self._timers) < NUM_MEASURED_BATCHES:
            return
        self._is_done = True
        times: dict[int, tuple[float, float]] = {}
        for part in self._groups.gather_in_pipeline(_medians(self._timers)):
            times.update(part)
        self._timers.clear()
        rank_zero_info(_text(times))

    def start_over(self) -> None:
        """After a step that failed: ranks may have run different numbers of batches, so counting starts again."""
        self._num_batches = 0
        self._timers.clear()


def _medians(timers: Sequence[StepTimer]) -> Times:
    found: dict[tuple[int, ActionKind], list[float]] = {}
    for timer in timers:
        for times in timer.times():
            if times.action.kind in (ActionKind.I, ActionKind.W):
                found.setdefault((times.action.stage, times.action.kind), []).append(times.work_ms)
    stages = {stage for stage, kind in found if kind is ActionKind.I}
    return {
        stage: (median(found[stage, ActionKind.I]), median(found.get((stage, ActionKind.W), [0.0]))) for stage in stages
    }


def _text(times: Times) -> str:
    backward_input, backward_weight = zip(*(times[stage] for stage in sorted(times)), strict=True)
    share = sum(backward_weight) / (sum(backward_input) + sum(backward_weight) or 1.0)
    stages = ", ".join(str(stage) for stage in sorted(times))
    return (
        "compile: weight gradients of compiled units are part of their backward, which I computes. Measured per "
        f"microbatch on stages {stages}: I {min(backward_input):.3g} to {max(backward_input):.3g} ms, "
        f"W {min(backward_weight):.3g} to {max(backward_weight):.3g} ms. So W is {100 * share:.1f} % of the backward, "
        "and that is all that a schedule with split backward can fill its bubbles with."
    )
