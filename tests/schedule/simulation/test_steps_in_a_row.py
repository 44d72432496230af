"""Steps in a row whose ranks do not wait for each other in between: what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_strategies import built_schedules

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Schedule, StageCosts, build_schedule


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 12), (8, 24)])
@pytest.mark.parametrize(("f", "i", "w"), [(10.0, 10.0, 10.0), (10.0, 14.0, 6.0)])
def test_a_step_in_a_row_takes_the_work_and_the_published_bubble(p: int, m: int, f: float, i: float, w: float) -> None:
    costs = StageCosts(f, i, w)
    bubbles = {"1f1b": f + i + w, "gpipe": f + i + w, "zb_h1": f + i - w, "zb_h2": f + i - 2 * w}
    for name, bubble in bubbles.items():
        schedule = build_schedule(name, num_ranks=p, num_microbatches=m)
        assert schedule.time_in_a_row(costs) == pytest.approx(m * (f + i + w) + (p - 1) * bubble, rel=1e-12), name


def one_after_the_other(schedule: Schedule, number: int) -> Schedule:
    """``number`` steps as one of so many times the microbatches."""
    m = schedule.num_microbatches
    programs = tuple(
        tuple(
            replace(action, microbatch=(action.microbatch or 0) + step * m)
            for step in range(number)
            for action in program
        )
        for program in schedule.programs
    )
    return replace(schedule, programs=programs, num_microbatches=number * m)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_it_is_what_a_long_row_of_steps_as_one_program_comes_to(data: st.DataObject) -> None:
    schedule, costs, _ = data.draw(built_schedules())
    number = 24
    times = one_after_the_other(schedule, number).simulate(costs)
    begins = [starts[:: len(program)] for starts, program in zip(times.start_ms, schedule.programs, strict=True)]
    period = max((row[number - 1] - row[number // 2]) / (number - 1 - number // 2) for row in begins)
    found = schedule.time_in_a_row(costs)
    assert found == pytest.approx(period, rel=0.01)
    assert found <= max(schedule.simulate(costs).span_ms) * (1 + 1e-9)


def test_a_rank_gathers_when_it_begins_and_begins_when_it_has_reduced() -> None:
    schedule = build_schedule("1f1b", num_ranks=1, num_microbatches=3)
    assert schedule.time_in_a_row(StageCosts(1.0, 1.0, 1.0, gather=5.0, reduce=7.0)) == 5.0 + 9.0 + 7.0


def test_a_deadlock_is_told() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    turned = replace(schedule, programs=(tuple(schedule.programs[0])[::-1], schedule.programs[1]))
    with pytest.raises(ScheduleError, match="deadlocks"):
        turned.time_in_a_row()
