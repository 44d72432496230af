"""Steps as a timer would have seen them, made by the schedule simulator."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import Schedule, StageCosts, build_schedule

UNEVEN_COSTS = {
    "forward": [2.0, 3.0, 2.5, 1.5],
    "backward_input": [1.0, 2.0, 3.0, 1.5],
    "backward_weight": [1.5, 0.5, 2.0, 1.0],
}


def schedule_and_costs(name: str, p2p: float = 0.25) -> tuple[Schedule, StageCosts]:
    """Four stages of uneven costs: on four ranks, or on two where the schedule puts two on each."""
    num_ranks = 2 if name in ("zb_v", "interleaved_1f1b") else 4
    return build_schedule(name, num_ranks=num_ranks, num_microbatches=6), StageCosts(**UNEVEN_COSTS, p2p=p2p)


def simulated_times(
    schedule: Schedule, costs: StageCosts, clocks: Sequence[float] | None = None
) -> list[list[ActionTimes]]:
    """For each rank, the times of a simulated step, on a clock that is so much ahead."""
    steps = []
    for rank, timeline in enumerate(schedule.simulate(costs).timeline):
        ahead = clocks[rank] if clocks else 0.0
        times: list[ActionTimes] = []
        asked = ahead
        for timed in timeline:
            if timed.action.kind.is_compute:
                times.append(ActionTimes(timed.action, asked, timed.start_ms + ahead, timed.end_ms + ahead))
                asked = timed.end_ms + ahead
        steps.append(times)
    return steps
