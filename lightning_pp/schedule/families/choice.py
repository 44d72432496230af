"""Choose among several programs of one family, and decide when to build more of them."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_pp.schedule.registry import ScheduleRequest
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.simulation.memory import exceeds

MOST_FITTED_ACTIONS = 1_000_000
"""Larger steps keep one published pattern: to fit it to the costs takes 10 to 50 µs an action, to compare two .3 µs."""


def best_of(candidates: Iterable[Schedule], request: ScheduleRequest) -> Schedule:
    """The candidate with the shortest time under the costs of the request, among those within its memory limit.

    Time is makespan plus longest span: a step alone takes the one, a step in a row of overlapping steps the other.
    When none is within the limit, the one that holds least, for the error that follows.
    """

    def badness(candidate: Schedule) -> tuple[bool, float, float]:
        simulation = candidate.simulate(request.costs)
        limits = request.memory_limit or simulation.peak_memory
        over = max((peak - limit for peak, limit in zip(simulation.peak_memory, limits, strict=True)), default=0.0)
        too_large = any(map(exceeds, simulation.peak_memory, limits))
        return too_large, over if too_large else 0.0, simulation.makespan + max(simulation.span_ms)

    return min(candidates, key=badness)
