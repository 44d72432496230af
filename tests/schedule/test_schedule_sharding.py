"""Sharding actions in every schedule: legal, within the budget, in torch's notation, and timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineScheduleRuntime

from lightning_pp.errors import ConfigurationError, ScheduleError
from lightning_pp.schedule import (
    Action,
    ActionKind,
    Schedule,
    Sharding,
    StageCosts,
    available_schedules,
    build_forward_only,
    build_schedule,
    insert_sharding,
)
from lightning_pp.schedule.fewer_microbatches import keep_first_microbatches
from lightning_pp.schedule.gathering import MOST_EXTRA_GATHERS, GatherPlan, fewest_gathers
from lightning_pp.schedule.sharding import SHARDING_MODES, ShardingMode, unit_plan, unit_uses

FAMILIES = [name for name in available_schedules() if name != "auto"]
SHARDING_KINDS = (ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE)
USES = (ActionKind.F, ActionKind.I, ActionKind.B)


def sharding_of(num_stages: int, units: int, mode: ShardingMode, budget: int | None, size: int = 4) -> Sharding:
    stages = tuple(tuple(f"{stage}.{unit}" for unit in range(units)) for stage in range(num_stages))
    return Sharding(mode, stages, {name: size for names in stages for name in names}, budget)


def computation(program: Iterable[Action]) -> list[Action]:
    return [action for action in program if action.kind.is_compute]


def with_last_backwards_split(program: tuple[Action, ...]) -> list[Action]:
    """As an independent reading: go backwards, and split the first B that is met before any W of its stage."""
    found: list[Action] = []
    met: set[int] = set()
    for action in reversed(program):
        if action.kind is ActionKind.B and action.stage not in met:
            found += [replace(action, kind=ActionKind.W), replace(action, kind=ActionKind.I)]
        else:
            found.append(action)
        if action.kind in (ActionKind.B, ActionKind.W):
            met.add(action.stage)
    return found[::-1]


def held_by_units(plan: GatherPlan[str], sharding: Sharding) -> Iterator[int]:
    gathered: set[str] = set()
    for step in plan.steps[:-1]:
        gathered = gathered.difference(step.frees).union(step.gathers)
        yield sum(sharding.num_bytes[unit] for unit in gathered)


def held_by_whole_stages(program: Schedule, rank: int) -> Iterator[tuple[Action, set[int]]]:
    gathered: set[int] = set()
    for action in program.programs[rank]:
        if action.kind is ActionKind.UNSHARD:
            assert action.stage not in gathered
            gathered.add(action.stage)
        elif action.kind is ActionKind.RESHARD:
            gathered.remove(action.stage)
        yield action, set(gathered)
    assert not gathered


@given(
    st.sampled_from(FAMILIES),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(SHARDING_MODES),
    st.one_of(st.none(), st.integers(4, 40)),
)
def test_any_program(name: str, num_ranks: int, m: int, units: int, mode: ShardingMode, budget: int | None) -> None:
    """Same computation in the same order; gathered when used, within the budget; few gathers; one REDUCE, at once."""
    plain = build_schedule(name, num_ranks=num_ranks, num_microbatches=m)
    sharding = sharding_of(plain.placement.num_stages, units, mode, budget if mode == "full_shard" else None)
    program = insert_sharding(plain, sharding)
    program.validate()
    for rank, actions in enumerate(program.programs):
        assert computation(actions) == with_last_backwards_split(plain.programs[rank])
        stages = plain.placement.stages_of_rank(rank)
        assert sorted(action.stage for action in actions if action.kind is ActionKind.REDUCE) == sorted(stages)
        for previous, action in pairwise(actions):
            if action.kind is ActionKind.REDUCE:
                assert previous.stage == action.stage and previous.kind is ActionKind.W
        if mode == "replicate":
            assert not any(action.kind in SHARDING_KINDS[:2] for action in actions)
            continue
        limit = sharding.budget_of(stages) if mode == "full_shard" else 4 * units * len(stages)
        held = list(held_by_whole_stages(program, rank))
        plan = unit_plan(program, sharding, rank)
        if plan is None:
            assert max(len(gathered) for _, gathered in held) * units * 4 <= limit
        else:
            assert max(held_by_units(plan.gathers, sharding)) <= limit
        assert all(action.stage in gathered for action, gathered in held if action.kind in USES)
        fewest = fewest_gathers(
            [unit for _, used in unit_uses(actions, sharding) for unit in used], sharding.num_bytes, limit
        )
        num_unsharded = sum(action.kind is ActionKind.UNSHARD for action in actions)
        num_gathers = units * num_unsharded if plan is None else plan.gathers.num_gathers
        assert fewest <= num_gathers <= MOST_EXTRA_GATHERS**2 * fewest
        if mode == "shard_grad_op":
            assert num_gathers == units * len(stages)


@given(st.sampled_from(FAMILIES), st.integers(1, 3), st.integers(1, 4), st.integers(4, 20))
def test_gathers_of_units_follow_the_actions(name: str, num_ranks: int, m: int, budget: int) -> None:
    """Whenever an action runs, its units have come by, in its order: F first to last, I and B last to first."""
    plain = build_schedule(name, num_ranks=num_ranks, num_microbatches=m)
    sharding = sharding_of(plain.placement.num_stages, 3, "full_shard", budget)
    program = insert_sharding(plain, sharding)
    for rank in range(num_ranks):
        plan = unit_plan(program, sharding, rank)
        if plan is None:
            continue
        previous = 0
        for action in computation(program.programs[rank]):
            uses = plan.uses_of[action]
            assert previous <= uses.first + 1 and uses.first <= uses.end
            units = sharding.stages[action.stage]
            if action.kind in USES:
                expected = units if action.kind is ActionKind.F else units[::-1]
                assert plan.gathers.uses[uses.first : uses.end] == expected
            previous = uses.end


def test_fewer_microbatches_make_the_same_gathers() -> None:
    schedule = build_schedule("zb_v", num_ranks=2, num_microbatches=6)
    program = insert_sharding(schedule, sharding_of(4, 2, "full_shard", 12))
    short = keep_first_microbatches(program, 4)
    assert short.num_microbatches == 4
    short.validate()
    for long_row, short_row in zip(program.programs, short.programs, strict=True):
        assert [a for a in long_row if a.kind in SHARDING_KINDS] == [a for a in short_row if a.kind in SHARDING_KINDS]


def test_batches_that_accumulate_keep_and_do_not_reduce() -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=2, num_microbatches=4)
    for mode in SHARDING_MODES:
        program = insert_sharding(schedule, sharding_of(4, 2, mode, None), reduces=False)
        kinds = {action.kind for row in program.programs for action in row}
        assert ActionKind.REDUCE not in kinds
        assert (ActionKind.RESHARD in kinds) == (mode == "full_shard")
    evaluation = build_forward_only(schedule.placement, 4)
    insert_sharding(evaluation, sharding_of(4, 2, "full_shard", None), reduces=False).validate()


def test_torch_reads_our_sharding_actions(tmp_path: Path) -> None:
    for name in FAMILIES:
        plain = build_schedule(name, num_ranks=2, num_microbatches=4)
        sharding = sharding_of(plain.placement.num_stages, 2, "full_shard", 16)
        schedule = insert_sharding(plain, sharding)
        path = tmp_path / f"{name}.csv"
        schedule.to_csv(path, with_waits=hasattr(_ComputationType, "WAIT_REDUCE_GRAD"))
        stage = SimpleNamespace(
            num_stages=schedule.placement.num_stages, group_size=2, group_rank=0, stage_index_to_group_rank=None
        )
        runtime = _PipelineScheduleRuntime([stage], 4)
        runtime._load_csv(str(path), format="compute_comms")
        for rank, program in enumerate(schedule.programs):
            theirs = [text for text in map(str, runtime.pipeline_order_with_comms[rank]) if "WAIT" not in text]
            assert theirs == list(map(str, program))
        read = Schedule.from_csv(path)
        assert read.programs == schedule.programs
        assert insert_sharding(read, sharding).programs == schedule.programs


# --------------------------------------------------------------------------- time


def test_gathers_hide_behind_computation_and_reductions_too() -> None:
    """One rank, two stages in turn, worked out by hand: gathers of 2 ms behind computation of 3 ms."""
    costs = StageCosts(forward=3.0, backward_input=3.0, backward_weight=3.0, gather=2.0, reduce=2.0)
    schedule = build_schedule("gpipe", num_ranks=1, num_microbatches=1, stages_per_rank=2)
    program = insert_sharding(schedule, sharding_of(2, 1, "full_shard", 8))
    simulation = program.simulate(costs)
    row = "0UNSHARD,1UNSHARD,0F0,1F0,1I0,1RESHARD,1W0,1REDUCE_GRAD,0I0,0RESHARD,0W0,0REDUCE_GRAD"
    assert ",".join(map(str, program.programs[0])) == row
    # gather 0, then 18 ms of work, then the reduction of stage 0
    assert math.isclose(simulation.makespan, 2.0 + 18.0 + 2.0)
    tight = insert_sharding(schedule, sharding_of(2, 1, "full_shard", 4)).simulate(costs)
    # nothing can be gathered ahead, so two gathers are waited for; the third hides behind W, which needs none
    assert math.isclose(tight.makespan, 2 * 2.0 + 18.0 + 2.0)


# --------------------------------------------------------------------------- refused


def test_budget_below_a_unit_names_it() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    sharding = Sharding("full_shard", (("embed", "block"), ("head",)), {"embed": 10, "block": 12, "head": 6}, 11)
    with pytest.raises(ConfigurationError, match=r"unshard_budget=11 bytes .* unit block .*12 bytes"):
        insert_sharding(schedule, sharding)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("0UNSHARD,0F0,0RESHARD,0B0", "0B0 uses stage 0, which is not gathered"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "0REDUCE_GRAD is repeated"),
        ("0F0,0I0,0REDUCE_GRAD,0W0", "0W0 comes after the gradients of stage 0 were reduced in cell 2"),
    ],
)
def test_programs_that_cannot_work(tmp_path: Path, row: str, error: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(row + "\n")
    with pytest.raises(ScheduleError, match=error):
        Schedule.from_csv(path)


def test_auto_ranks_with_the_gathers_of_the_budget() -> None:
    """Where a window holds one of two stages, going back and forth between them costs a gather each time."""
    costs = StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0, gather=3.0)
    sharding = sharding_of(4, 2, "full_shard", 8)
    sizes = {"num_ranks": 2, "num_microbatches": 6, "stages_per_rank": 2, "quick": True}

    def makespan(schedule: Schedule) -> float:
        return insert_sharding(schedule, sharding).simulate(costs).makespan

    plain = build_schedule("auto", costs=costs, **sizes)
    aware = build_schedule("auto", costs=costs, sharding=sharding, **sizes)
    assert not any(action.kind in SHARDING_KINDS for program in aware.programs for action in program)
    assert makespan(aware) < 0.9 * makespan(plain)
