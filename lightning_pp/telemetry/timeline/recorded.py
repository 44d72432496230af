"""A step to look at: measured, beside its planned program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from lightning_pp.schedule import ActionKind, StageCosts
from lightning_pp.telemetry.timeline.step import Timeline, needs


@dataclass(frozen=True)
class RecordedStep:
    """One step, measured and planned.

    Attributes:
        step: The optimizer step, counted as Lightning logs it.
        measured: What the ranks did.
        planned: The same program, simulated with what its actions took on each stage (:func:`measured_costs`): what
            the step would have been if nothing had been slower than usual and nobody had waited without need.
    """

    step: int
    measured: Timeline
    planned: Timeline

    @classmethod
    def of(cls, step: int, measured: Timeline) -> RecordedStep:
        """A measured step, with the plan that belongs to it."""
        return cls(step, measured, Timeline.simulated(measured.schedule, measured_costs(measured)))


def measured_costs(timeline: Timeline) -> StageCosts:
    """What the actions of each stage took in a step: the median over its microbatches, milliseconds.

    A message is given the time that passed from the end of the action that sent it to the start of one that stood
    waiting for it; where nobody waited it is 0, since it went on beside the work. Gathers and reductions cost 0: a
    measured step only has when they were begun.
    """
    num_stages = timeline.schedule.placement.num_stages
    took: dict[tuple[int, ActionKind], list[float]] = {}
    for times in timeline.ranks:
        for moment in times:
            took.setdefault((moment.action.stage, moment.action.kind), []).append(moment.work_ms)

    def of(kind: ActionKind) -> list[float]:
        return [_median(took.get((stage, kind), ())) for stage in range(num_stages)]

    backward_input = [
        split if (stage, ActionKind.I) in took else whole
        for stage, (split, whole) in enumerate(zip(of(ActionKind.I), of(ActionKind.B), strict=True))
    ]
    return StageCosts(of(ActionKind.F), backward_input, of(ActionKind.W), _message_ms(timeline))


def _message_ms(timeline: Timeline) -> list[float]:
    """By sending stage."""
    placement = timeline.schedule.placement
    time_of = {moment.action: moment for times in timeline.ranks for moment in times}
    found: dict[int, list[float]] = {}
    for moment in time_of.values():
        if moment.wait_ms <= 0:
            continue
        rank = placement.rank_of_stage[moment.action.stage]
        for needed in needs(moment.action, placement.num_stages):
            if needed in time_of and placement.rank_of_stage[needed.stage] != rank:
                found.setdefault(needed.stage, []).append(moment.start_ms - time_of[needed].end_ms)
    return [max(0.0, _median(found.get(stage, ()))) for stage in range(placement.num_stages)]


def _median(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(median(numbers)) if numbers else 0.0
