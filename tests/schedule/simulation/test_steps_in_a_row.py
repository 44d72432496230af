"""Steps in a row whose ranks do not wait for each other in between: what they take, and what ``auto`` makes of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_strategies import built_schedules

from lightning_pp.errors import ScheduleError
from lightning_pp.planning.schedules.predictions import Prediction
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.schedule import Placement, Schedule, StageCosts, available_schedules, build_schedule
from lightning_pp.schedule.registry import schedule_family
from lightning_pp.schedule.simulation.ahead import forwards_ahead
from lightning_pp.schedule.simulation.engine import CostTables, encode
from lightning_pp.strategy import PipelineParallelStrategy


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


@settings(max_examples=40, deadline=None)
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


def time_with_the_norm(schedule: Schedule, costs: StageCosts, number: int) -> float:
    """A step of a row whose ranks wait, after their forwards ahead, until all have ended the step before."""
    tables, m = CostTables.build(schedule.placement, costs), schedule.num_microbatches
    codes, ahead = encode(schedule), forwards_ahead(schedule)
    clock, ended = [0.0] * len(codes), [0.0]
    for _ in range(number):
        done: dict[tuple[int, int], float] = {}
        places = [0] * len(codes)
        while any(place < len(program) for place, program in zip(places, codes, strict=True)):
            for rank, program in enumerate(codes):
                while places[rank] < len(program):
                    row, microbatch = divmod(program[places[rank]], m)
                    needed = tables.needs[row], microbatch
                    if needed[0] >= 0 and needed not in done:
                        break
                    arrived = done[needed] + tables.latency[row] if needed[0] >= 0 else 0.0
                    told = ended[-1] if places[rank] >= ahead[rank] else 0.0
                    clock[rank] = max(clock[rank], arrived, told) + tables.duration[row]
                    done[tables.publishes[row], microbatch] = clock[rank]
                    places[rank] += 1
        ended.append(max(clock))
    return (ended[-1] - ended[number // 2]) / (number - number // 2)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "interleaved_zb"])
def test_forwards_ahead_are_enough_to_wait_for_nothing(name: str) -> None:
    draw = random.Random(0)
    for _ in range(6):
        f, i, w = draw.uniform(6, 12), draw.uniform(8, 14), draw.uniform(5, 11)
        num_stages = 4 * schedule_family(name).default_stages_per_rank
        times = [[time * draw.uniform(0.9, 1.1) for _ in range(num_stages)] for time in (f, i, w)]
        costs = StageCosts(*times, p2p=draw.choice((0.0, 0.5)))
        schedule = build_schedule(name, num_ranks=4, num_microbatches=draw.choice((8, 12)), costs=costs)
        assert time_with_the_norm(schedule, costs, 10) == pytest.approx(schedule.time_in_a_row(costs), rel=1e-6)


def test_a_rank_gathers_when_it_begins_and_begins_when_it_has_reduced() -> None:
    schedule = build_schedule("1f1b", num_ranks=1, num_microbatches=3)
    assert schedule.time_in_a_row(StageCosts(1.0, 1.0, 1.0, gather=5.0, reduce=7.0)) == 5.0 + 9.0 + 7.0


def test_a_deadlock_is_told() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    turned = replace(schedule, programs=(tuple(schedule.programs[0])[::-1], schedule.programs[1]))
    with pytest.raises(ScheduleError, match="deadlocks"):
        turned.time_in_a_row()


@pytest.mark.parametrize(("p", "m", "quick"), [(2, 3, False), (3, 9, True), (4, 12, True)])
def test_auto_takes_the_shortest_step_in_a_row_if_steps_are_back_to_back(p: int, m: int, quick: bool) -> None:
    costs = StageCosts([6.0, 17.0, 9.0, 8.0][:p], [8.0, 12.0, 19.0, 7.0][:p], [3.0, 9.0, 5.0, 4.0][:p], p2p=1.0)
    sizes: dict[str, Any] = {"num_ranks": p, "num_microbatches": m, "costs": costs, "memory_limit": p + 1.0}
    found = build_schedule("auto", back_to_back=True, quick=quick, **sizes)
    found.validate(costs=costs, memory_limit=p + 1.0)
    others = [build_schedule("auto", quick=quick, **sizes)]
    for name in available_schedules():
        if schedule_family(name).allows(1) and not schedule_family(name).is_search:
            try:
                others.append(build_schedule(name, stages_per_rank=1, **sizes))
            except ScheduleError:
                continue  # over the limit
    assert found.time_in_a_row(costs) <= min(other.time_in_a_row(costs) for other in others) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "auto"])
def test_deferred_updates_are_planned_as_steps_back_to_back(name: str) -> None:
    placement = Placement.interleaved(4)
    costs = StageCosts(10.0, 10.0, 10.0)
    deferring = PipelineParallelStrategy(4, schedule=name, optimizer_sync="deferred").options.schedule.source
    waiting = PipelineParallelStrategy(4, schedule=name).options.schedule.source
    assert deferring == schedule_source(name, back_to_back=True) and waiting == schedule_source(name)
    schedule = deferring.program(placement, 12, costs, 8.0)
    predicted = Prediction.of(name, schedule, costs, deferring)
    expected = 12 * 30.0 + (3 * 30.0 if name == "1f1b" else 0.0)
    assert predicted.step_ms == pytest.approx(expected)
    assert predicted.bubble_fraction == pytest.approx(1 - 12 * 30.0 / expected)
