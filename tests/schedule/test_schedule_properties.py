"""What holds for every family, size and cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import built_schedules

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Schedule, StageCosts, build_schedule
from lightning_pp.schedule.fewer_microbatches import keep_first_microbatches
from lightning_pp.schedule.merging import split_backwards


@given(built_schedules())
def test_every_schedule_is_legal_and_complete(built: tuple[Schedule, StageCosts, dict[str, Any]]) -> None:
    schedule, costs, request = built
    schedule.validate(costs=costs)
    placement, m = schedule.placement, schedule.num_microbatches
    assert (placement.num_ranks, m) == (request["num_ranks"], request["num_microbatches"])
    work: dict[tuple[int, int], set[str]] = {}
    for program in schedule.programs:
        for action in program:
            assert action.microbatch is not None
            work.setdefault((action.stage, action.microbatch), set()).add(action.kind.value)
    assert len(work) == placement.num_stages * m
    assert all(kinds in ({"F", "B"}, {"F", "I", "W"}) for kinds in work.values())


@given(built_schedules())
def test_building_and_simulating_are_deterministic(built: tuple[Schedule, StageCosts, dict[str, Any]]) -> None:
    schedule, costs, request = built
    again = build_schedule(**request)
    assert again == schedule
    assert again.simulate(costs) == schedule.simulate(costs)


@given(built_schedules(), st.data())
def test_what_is_left_without_the_last_microbatches_is_legal(
    built: tuple[Schedule, StageCosts, dict[str, Any]], data: st.DataObject
) -> None:
    schedule, costs, _ = built
    number = data.draw(st.integers(1, schedule.num_microbatches))
    fewer = keep_first_microbatches(schedule, number)
    fewer.validate(costs=costs, memory_limit=schedule.simulate(costs).peak_memory)
    assert (fewer.num_microbatches, fewer.placement) == (number, schedule.placement)
    for program, whole in zip(fewer.programs, schedule.programs, strict=True):
        remaining = iter(whole)
        assert all(action in remaining for action in program), "the order has changed"
    with pytest.raises(ScheduleError, match=f"has {schedule.num_microbatches} microbatches"):
        keep_first_microbatches(schedule, schedule.num_microbatches + 1)


@given(built_schedules())
def test_splitting_every_backward_changes_no_time(built: tuple[Schedule, StageCosts, dict[str, Any]]) -> None:
    """A B costs as much as I and W in a row, and nobody else gets less: only who waits for an I may get it earlier."""
    schedule, costs, _ = built
    split = split_backwards(schedule).validate(costs=costs)
    kinds = {action.kind.value for program in split.programs for action in program}
    assert kinds == {"F", "I", "W"}
    before, after = schedule.simulate(costs), split.simulate(costs)
    assert after.work_ms == pytest.approx(before.work_ms)
    assert after.makespan <= before.makespan + 1e-9
