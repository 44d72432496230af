"""Predicted times of a step under several schedules, by the same costs."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pp.schedule import BubbleFraction, Placement, Schedule, StageCosts


def step_time(schedule: Schedule, costs: StageCosts) -> float:
    """The time of a step in a row of overlapping ones, in the unit of ``costs``: the longest span of a rank.

    Every estimate of a step asks here: of layouts, of cuts with a head or blocks in parts, of predictions. Others are
    of another quantity: moved cuts are ranked by units alone, many at a time, and bounds say what no cut can reach.
    """
    return max(schedule.simulate(costs).span_ms)


@dataclass(frozen=True)
class Prediction:
    """One schedule, as it is simulated.

    Attributes:
        schedule: Its name.
        placement: Where its stages are: one chunk, V, interleaved.
        num_stages: How many they are.
        is_chosen: Whether it is the one that is run.
        step_ms: The time of a step in a row of overlapping ones, milliseconds; None where it cannot be used.
        bubble_fraction: ``1 - work / step_ms``; None as well.
        held_gib: The most that a rank holds of microbatches, GiB; None as well.
        why_not: Why it cannot be used; empty where it can.
    """

    schedule: str
    placement: str
    num_stages: int
    is_chosen: bool = False
    step_ms: float | None = None
    bubble_fraction: float | None = None
    held_gib: float | None = None
    why_not: str = ""

    @classmethod
    def of(cls, name: str, schedule: Schedule, costs: StageCosts, *, is_chosen: bool = False) -> Prediction:
        """What ``costs``, with ``held_*`` in GiB, say of ``schedule``."""
        simulation, placement = schedule.simulate(costs), schedule.placement
        step_ms = step_time(schedule, costs)
        return cls(
            name,
            placement.kind,
            placement.num_stages,
            is_chosen,
            step_ms,
            float(BubbleFraction(simulation.work_ms, [step_ms] * placement.num_ranks)),
            float(max(simulation.peak_memory)),
        )

    @classmethod
    def impossible(cls, name: str, placement: Placement, error: Exception) -> Prediction:
        """A schedule that cannot be used there, and why."""
        return cls(name, placement.kind, placement.num_stages, why_not=str(error))
