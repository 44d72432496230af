"""Simulated times are those of ranks that really wait for each other; none of them waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from schedule_strategies import built_schedules, search_requests
from thread_emulation import emulate

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Schedule, StageCosts, build_forward_only, build_schedule


def check_against_threads(schedule: Schedule, costs: StageCosts) -> None:
    emulated, simulation = emulate(schedule, costs), schedule.simulate(costs)
    for rank in range(len(schedule.programs)):
        assert emulated.start_ms[rank] == pytest.approx(simulation.start_ms[rank], abs=1e-9)
        assert emulated.end_ms[rank] == pytest.approx(simulation.end_ms[rank], abs=1e-9)
    assert simulation.makespan == pytest.approx(max(map(max, emulated.end_ms)), abs=1e-9)
    assert simulation.peak_memory == pytest.approx(emulated.peak_memory, abs=1e-9)


@given(built_schedules(most_ranks=8))
@settings(max_examples=60)
def test_hand_made_schedules(built: tuple[Schedule, StageCosts, dict[str, Any]]) -> None:
    check_against_threads(built[0], built[1])


@given(built_schedules())
@settings(max_examples=20)
def test_evaluation(built: tuple[Schedule, StageCosts, dict[str, Any]]) -> None:
    schedule, costs, _ = built
    check_against_threads(build_forward_only(schedule.placement, schedule.num_microbatches), costs)


@given(built_schedules())
@settings(max_examples=30)
def test_a_memory_limit_is_kept_or_refused(built: tuple[Schedule, StageCosts, dict[str, Any]]) -> None:
    schedule, costs, _ = built
    peak = max(emulate(schedule, costs).peak_memory)
    schedule.validate(costs=costs, memory_limit=peak)
    with pytest.raises(ScheduleError, match="memory limit"):
        schedule.validate(costs=costs, memory_limit=0.9 * peak)


@given(search_requests())
@settings(max_examples=5)
def test_searched_schedules_keep_their_limit(request: dict[str, Any]) -> None:
    schedule, costs = build_schedule("auto", **request), request["costs"]
    check_against_threads(schedule, costs)
    assert max(emulate(schedule, costs).peak_memory) <= request["memory_limit"] + 1e-9
