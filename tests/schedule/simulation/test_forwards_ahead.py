"""The forwards with which ranks begin a step before the step before has ended everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pp.schedule import ActionKind, Schedule, available_schedules, build_schedule
from lightning_pp.schedule.simulation.ahead import forwards_ahead


def two_steps(schedule: Schedule) -> Schedule:
    m = schedule.num_microbatches
    programs = tuple(
        (
            *program,
            *(replace(action, microbatch=action.microbatch + m) for action in program if action.microbatch is not None),
        )
        for program in schedule.programs
    )
    return replace(schedule, programs=programs, num_microbatches=2 * m)


@pytest.mark.parametrize("name", [name for name in available_schedules() if name != "auto"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_they_begin_before_all_ranks_have_ended(name: str, num_ranks: int) -> None:
    """Against a simulation of two steps one after the other."""
    schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
    counts = forwards_ahead(schedule)
    simulation = two_steps(schedule).simulate()
    lengths = [len(program) for program in schedule.programs]
    ended = max(ends[n - 1] for ends, n in zip(simulation.end_ms, lengths, strict=True))
    last_stage = schedule.placement.num_stages - 1
    for program, starts, n, count in zip(schedule.programs, simulation.start_ms, lengths, counts, strict=True):
        ahead = program[:count]
        assert all(action.kind is ActionKind.F and action.stage != last_stage for action in ahead)
        assert all(start <= ended for start in starts[n : n + count])
        following = program[count]
        if following.kind is ActionKind.F and following.stage != last_stage:
            assert starts[n + count] > ended


def test_the_first_ranks_of_zb_h2_run_ahead() -> None:
    """Rank r ends (p - 1 - r) forwards before the last one, and may begin one more just then."""
    schedule = build_schedule("zb_h2", num_ranks=4, num_microbatches=12)
    assert forwards_ahead(schedule) == (4, 3, 2, 0)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_where_the_first_rank_ends_last_nobody_runs_ahead_of_it(name: str) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=12)
    assert forwards_ahead(schedule) == (1, 0, 0, 0)
