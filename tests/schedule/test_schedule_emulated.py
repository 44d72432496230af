"""Simulated times are those of taking one action after the other; no rank waits for ever."""

from __future__ import annotations

from typing import Any

import one_at_a_time
import pytest
from hypothesis import given, settings
from schedule_strategies import built_schedules, search_requests

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Schedule, StageCosts, build_forward_only, build_schedule


def peaks_of(schedule: Schedule, costs: StageCosts) -> list[float]:
    return [max(one_at_a_time.held_after_each(schedule, rank, costs)) for rank in range(len(schedule.programs))]


def check_one_at_a_time(schedule: Schedule, costs: StageCosts) -> None:
    starts, ends, ended = one_at_a_time.run(schedule, costs)
    assert list(map(len, starts)) == list(map(len, schedule.programs))
    simulation = schedule.simulate(costs)
    for rank in range(len(schedule.programs)):
        assert starts[rank] == pytest.approx(simulation.start_ms[rank], abs=1e-9)
        assert ends[rank] == pytest.approx(simulation.end_ms[rank], abs=1e-9)
    assert simulation.makespan == pytest.approx(max(ended), abs=1e-9)
    assert simulation.peak_memory == pytest.approx(peaks_of(schedule, costs), abs=1e-9)


@given(built_schedules(most_ranks=8))
@settings(max_examples=60)
def test_hand_made_schedules(built: tuple[Schedule, StageCosts, dict[str, Any]]) -> None:
    check_one_at_a_time(built[0], built[1])


@given(built_schedules())
@settings(max_examples=20)
def test_evaluation(built: tuple[Schedule, StageCosts, dict[str, Any]]) -> None:
    schedule, costs, _ = built
    check_one_at_a_time(build_forward_only(schedule.placement, schedule.num_microbatches), costs)


@given(built_schedules())
@settings(max_examples=30)
def test_a_memory_limit_is_kept_or_refused(built: tuple[Schedule, StageCosts, dict[str, Any]]) -> None:
    schedule, costs, _ = built
    peak = max(peaks_of(schedule, costs))
    schedule.validate(costs=costs, memory_limit=peak)
    with pytest.raises(ScheduleError, match="memory limit"):
        schedule.validate(costs=costs, memory_limit=0.9 * peak)


@given(search_requests())
@settings(max_examples=3)
def test_searched_schedules_keep_their_limit(request: dict[str, Any]) -> None:
    schedule, costs = build_schedule("auto", **request), request["costs"]
    check_one_at_a_time(schedule, costs)
    assert max(peaks_of(schedule, costs)) <= request["memory_limit"] + 1e-9
