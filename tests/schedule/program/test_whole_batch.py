"""Schedules of steps whose loss needs the whole batch: what the constraint forces, that it is kept, what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_strategies import built_schedules, milliseconds, stage_costs

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import (
    Action,
    Placement,
    Schedule,
    Sharding,
    StageCosts,
    available_schedules,
    build_schedule,
    insert_sharding,
)
from lightning_pp.schedule.fewer_microbatches import keep_first_microbatches
from lightning_pp.schedule.merging import split_backwards
from lightning_pp.schedule.registry import schedule_family

Built = tuple[Schedule, StageCosts, dict[str, Any]]


def needed_by(action: Action, schedule: Schedule) -> Iterator[str]:
    """What an action waits for, by the definition of a pipeline and of the constraint; B is written as I."""
    stage, kind, microbatch = action.stage, action.kind.value, action.microbatch
    last = schedule.placement.num_stages - 1
    if kind == "F":
        yield from [f"{stage - 1}F{microbatch}"] if stage else []
    elif kind == "W":
        yield f"{stage}I{microbatch}"
    else:
        yield f"{stage}F{microbatch}"
        if stage < last:
            yield f"{stage + 1}I{microbatch}"
        else:
            yield from (f"{last}F{other}" for other in range(schedule.num_microbatches))


def order_that_runs(schedule: Schedule) -> list[Action]:
    """All actions in an order in which they can be run, by trying ranks in turn; fails on a deadlock."""
    programs = [list(program) for program in schedule.programs]
    done: set[str] = set()
    order: list[Action] = []
    while any(programs):
        ready = [program for program in programs if program and done.issuperset(needed_by(program[0], schedule))]
        assert ready, f"deadlock before {[str(program[0]) for program in programs if program]}"
        for program in ready:
            order.append(program.pop(0))
            done.add(str(order[-1]).replace("B", "I"))
    return order


def kinds_of(program: tuple[Action, ...]) -> str:
    return "".join(action.kind.value for action in program)


@given(built_schedules())
def test_every_program_becomes_its_forwards_then_its_backwards(built: Built) -> None:
    schedule, costs, _ = built
    whole = schedule.with_whole_batch_loss()
    for program, original in zip(whole.programs, schedule.programs, strict=True):
        forwards = [action for action in original if action.kind.value == "F"]
        backwards = [action for action in original if action.kind.value != "F"]
        assert program == (*forwards, *backwards)
    order_that_runs(whole)
    assert whole.validate(costs=costs) is whole
    assert whole.with_whole_batch_loss() == whole
    assert (whole.name, whole.placement, whole.whole_batch_loss) == (schedule.name, schedule.placement, True)


@given(built_schedules(most_ranks=3))
def test_no_other_order_of_forwards_and_backwards_can_run(built: Built) -> None:
    """Whatever a rank does, a program with an F after a backward never gets to its end under the constraint."""
    schedule, costs, _ = built
    for rank, program in enumerate(schedule.programs):
        if "F" not in kinds_of(program).lstrip("F"):
            continue
        others = schedule.with_whole_batch_loss().programs
        mixed = replace(schedule, programs=(*others[:rank], program, *others[rank + 1 :]), whole_batch_loss=True)
        with pytest.raises(AssertionError, match="deadlock before"):
            order_that_runs(mixed)
        with pytest.raises(ScheduleError, match=f"(?s)rank {rank}, cell .* comes after .*every backward needs"):
            mixed.validate(costs=costs)
        with pytest.raises(ScheduleError, match="deadlocks"):
            mixed.simulate(costs)


@given(built_schedules())
def test_the_simulation_waits_for_the_last_forward(built: Built) -> None:
    schedule, costs, request = built
    whole = build_schedule(**request, whole_batch_loss=True)
    cells = [cell for row in whole.simulate(costs).timeline for cell in row]
    last = schedule.placement.num_stages - 1
    end_of_forwards = max(cell.end_ms for cell in cells if cell.action.kind.value == "F")
    assert end_of_forwards == max(c.end_ms for c in cells if c.action.kind.value == "F" and c.action.stage == last)
    assert min(cell.start_ms for cell in cells if cell.action.kind.value != "F") >= end_of_forwards


@given(built_schedules())
def test_every_rank_holds_all_microbatches(built: Built) -> None:
    schedule, costs, request = built
    peaks = build_schedule(**request, whole_batch_loss=True).simulate(costs).peak_memory
    assert peaks == tuple(float(len(s) * schedule.num_microbatches) for s in stages_of_ranks(schedule.placement))
    assert all(peak >= before for peak, before in zip(peaks, schedule.simulate(costs).peak_memory, strict=True))


def stages_of_ranks(placement: Placement) -> list[tuple[int, ...]]:
    return [placement.stages_of_rank(rank) for rank in range(placement.num_ranks)]


@settings(max_examples=30)
@given(p=st.integers(1, 6), m=st.integers(1, 20), f=milliseconds, i=milliseconds, w=milliseconds)
def test_makespans_of_even_stages(p: int, m: int, f: float, i: float, w: float) -> None:
    """With B the first gradient passes whole backwards on its way up; with I and W only input gradients."""
    sizes: dict[str, Any] = {"num_ranks": p, "num_microbatches": m, "stages_per_rank": 1}
    costs = StageCosts(f, i, w)
    work = m * (f + i + w)
    whole = build_schedule("1f1b", **sizes, whole_batch_loss=True).simulate(costs)
    assert whole.makespan == pytest.approx(work + (p - 1) * (f + i + w))
    auto = build_schedule("auto", **sizes, costs=costs, whole_batch_loss=True).simulate(costs)
    assert auto.makespan == pytest.approx(work + (p - 1) * (f + i))


@given(built_schedules(), st.data())
def test_what_is_made_of_such_a_schedule_keeps_the_constraint(built: Built, data: st.DataObject) -> None:
    schedule, costs, _ = built
    whole = schedule.with_whole_batch_loss()
    fewer = keep_first_microbatches(whole, data.draw(st.integers(1, whole.num_microbatches)))
    units = tuple((f"unit {stage}",) for stage in range(schedule.placement.num_stages))
    sharding = Sharding("full_shard", units, dict.fromkeys((name for (name,) in units), 4))
    for made in (fewer, split_backwards(whole), insert_sharding(whole, sharding)):
        assert made.whole_batch_loss
        order_that_runs(replace(made, programs=tuple(compute_of(program) for program in made.programs)))
        made.validate(costs=costs)


def compute_of(program: tuple[Action, ...]) -> tuple[Action, ...]:
    return tuple(action for action in program if action.microbatch is not None)


def test_sharding_actions_are_left_out_of_a_program_that_changes() -> None:
    units = (("a",), ("b",))
    sharding = Sharding("full_shard", units, {"a": 1, "b": 1})
    sharded = insert_sharding(build_schedule("1f1b", num_ranks=2, num_microbatches=3), sharding)
    changed = sharded.with_whole_batch_loss()
    assert all(action.microbatch is not None for program in changed.programs for action in program)
    unchanged = insert_sharding(build_schedule("gpipe", num_ranks=2, num_microbatches=3), sharding)
    assert unchanged.with_whole_batch_loss().programs == unchanged.programs


# ---------------------------------------------------------------- the search


@st.composite
def whole_batch_requests(draw: st.DrawFn) -> dict[str, Any]:
    p, v = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    m = draw(st.integers(1, 5))
    return {"num_ranks": p, "num_microbatches": m, "stages_per_rank": v, "costs": draw(stage_costs(p * v))}


@settings(max_examples=20)
@given(whole_batch_requests())
def test_the_search_is_legal_and_not_longer_than_any_family(request: dict[str, Any]) -> None:
    costs = request["costs"]
    found = build_schedule("auto", **request, whole_batch_loss=True).validate(costs=costs)
    order_that_runs(found)
    makespan = found.simulate(costs).makespan
    for name in available_schedules():
        if name != "auto" and schedule_family(name).allows(request["stages_per_rank"]):
            other = build_schedule(name, **request, whole_batch_loss=True)
            assert makespan <= 1.0051 * other.simulate(costs).makespan
    assert build_schedule("auto", **request, whole_batch_loss=True) == found


@pytest.mark.nightly
@settings(max_examples=20)
@given(
    st.sampled_from(
        [(3, 3, Placement.interleaved(3)), (2, 2, Placement.interleaved(2)), (2, 1, Placement.v_shaped(2))]
    ).flatmap(lambda size: st.tuples(st.just(size), stage_costs(size[2].num_stages)))
)
def test_the_search_finds_the_shortest_of_all_orders(drawn: tuple[tuple[int, int, Placement], StageCosts]) -> None:
    (p, m, placement), costs = drawn
    sizes = {"num_ranks": p, "num_microbatches": m, "stages_per_rank": placement.num_stages // p}
    found = build_schedule("auto", **sizes, costs=costs, placement=placement, whole_batch_loss=True)
    shortest = min(schedule.simulate(costs).makespan for schedule in all_orders(placement, m))
    assert found.simulate(costs).makespan <= 1.005 * shortest + 1e-9
    # without the constraint there are more orders, and none of those with it is shorter than their best
    free = build_schedule("auto", **sizes, costs=costs, placement=placement)
    assert free.simulate(costs).makespan <= 1.005 * shortest + 1e-9


def all_orders(placement: Placement, m: int) -> Iterator[Schedule]:
    """Every schedule under the constraint, of I and W; microbatches are alike, so each stage takes them in turn."""
    per_rank = [list(orders_of_rank(stages, m)) for stages in stages_of_ranks(placement)]
    for programs in product(*per_rank):
        schedule = Schedule("any", placement, m, programs, whole_batch_loss=True)
        try:
            yield schedule.validate()
        except ScheduleError:
            continue


def orders_of_rank(stages: tuple[int, ...], m: int) -> Iterator[tuple[Action, ...]]:
    forwards = set(permutations(stage for stage in stages for _ in range(m)))
    kinds = set(permutations(f"{stage}{kind}" for stage in stages for kind in "IW" for _ in range(m)))
    for first, second in product(forwards, kinds):
        numbers: dict[str, int] = {}
        program = []
        for token in [*(f"{stage}F" for stage in first), *second]:
            numbers[token] = numbers.get(token, -1) + 1
            program.append(Action.parse(f"{token}{numbers[token]}"))
        if all(numbers_in_order(program, stage) for stage in stages):
            yield tuple(program)


def numbers_in_order(program: list[Action], stage: int) -> bool:
    """Each W after the I of its microbatch."""
    place = {str(action): cell for cell, action in enumerate(program)}
    return all(
        place[f"{stage}I{j}"] < place[f"{stage}W{j}"] for j in range(sum(a.stage == stage for a in program) // 3)
    )


def test_weight_gradients_fill_the_way_of_the_input_gradients() -> None:
    """On a slow last stage the others have time for W between two I; the search uses it, and keeps I before W."""
    costs = StageCosts(1.0, [1.0, 1.0, 4.0], [2.0, 2.0, 4.0])
    found = build_schedule("auto", num_ranks=3, num_microbatches=4, costs=costs, whole_batch_loss=True)
    simulation = found.simulate(costs)
    # the last stage: its first F can start after two others, then 4 F; its I and W have no wait
    assert simulation.makespan == 2 + 4 + 4 * (4 + 4)
    assert all(a.kind.value != "W" or b.kind.value != "F" for program in found.programs for a, b in pairwise(program))


@pytest.mark.parametrize("name", ["auto", "v_min", "v_half", "zb_v"])
def test_a_limit_below_all_microbatches_is_refused(name: str) -> None:
    sizes: dict[str, Any] = {"num_ranks": 3, "num_microbatches": 7, "stages_per_rank": 2, "whole_batch_loss": True}
    build_schedule(name, memory_limit=14, **sizes).validate(memory_limit=14)
    pattern = (
        r"limit.* 13.*holds all 7 microbatches of a batch.*smallest limit that works is 14\. "
        r"Use fewer samples in a batch.*activation_checkpointing"
    )
    with pytest.raises(ScheduleError, match=pattern):
        build_schedule(name, memory_limit=13, **sizes)


def test_what_holds_more_after_input_gradients_stays_within_the_limit() -> None:
    """Then not every order of the backwards fits; full backwards do."""
    costs = StageCosts(1.0, 1.0, 1.0, held_after_forward=1.0, held_after_input=3.0)
    found = build_schedule("auto", num_ranks=2, num_microbatches=4, costs=costs, memory_limit=5, whole_batch_loss=True)
    assert max(found.simulate(costs).peak_memory) <= 5


def test_auto_finds_the_optimum_of_a_small_step() -> None:
    """75 ms is what CP-SAT proves to be the shortest."""
    costs = StageCosts([5.0, 9.0], [8.0, 3.0], 4.0, p2p=2.0)
    found = build_schedule("auto", num_ranks=2, num_microbatches=3, costs=costs, whole_batch_loss=True)
    assert found.simulate(costs).makespan == pytest.approx(75.0)
