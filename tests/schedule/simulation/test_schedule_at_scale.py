"""Programs as codes, and what works on them as arrays, against the same things one action at a time."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import numpy as np
import one_at_a_time
import pytest

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Placement, Schedule, StageCosts, available_schedules, build_schedule
from lightning_pp.schedule.program.coded import CodedProgram
from lightning_pp.schedule.registry import schedule_family
from lightning_pp.schedule.sharding import Sharding, ShardingMode, insert_sharding, with_last_split
from lightning_pp.schedule.simulation.costs import UNIT_COSTS
from lightning_pp.schedule.simulation.execution import CostTables, Execution
from lightning_pp.schedule.simulation.simulate import step_length

HAND_MADE = [name for name in available_schedules() if not schedule_family(name).is_search]


def uneven(num_stages: int) -> StageCosts:
    """Costs that are alike for no two stages."""
    draw = random.Random(num_stages)
    forward, backward_input, weight = ([draw.uniform(3, 20) for _ in range(num_stages)] for _ in range(3))
    gather, reduce = ([draw.uniform(3, 20) for _ in range(num_stages)] for _ in range(2))
    return StageCosts(forward, backward_input, weight, p2p=1.3, held_after_input=0.37, gather=gather, reduce=reduce)


def gathered_whole(schedule: Schedule, mode: ShardingMode) -> Schedule:
    """``schedule`` with the sharding actions of ``mode``."""
    units = tuple((f"{stage}a", f"{stage}b") for stage in range(schedule.placement.num_stages))
    return insert_sharding(schedule, Sharding(mode, units, {unit: 1 for stage in units for unit in stage}))


@pytest.mark.by_day(40)
@pytest.mark.parametrize("mode", [None, "replicate", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("whole_batch_loss", [False, True])
@pytest.mark.parametrize("name", HAND_MADE)
def test_all_ranks_at_a_time_take_the_times_of_one_action_at_a_time(
    name: str, whole_batch_loss: bool, mode: ShardingMode | None
) -> None:
    costs = uneven(6 * schedule_family(name).default_stages_per_rank)
    costs = costs if mode else replace(costs, gather=0.0, reduce=0.0)
    schedule = build_schedule(name, num_ranks=6, num_microbatches=13, costs=costs, whole_batch_loss=whole_batch_loss)
    peaks = schedule.simulate(costs).peak_memory
    for one in (schedule, gathered_whole(schedule, mode)) if mode else (schedule,):
        simulation = one.simulate(costs)
        starts, ends, ended = one_at_a_time.run(one, costs)
        assert list(map(list, simulation.start_ms)) == starts and list(map(list, simulation.end_ms)) == ends
        assert simulation.makespan == max(ended) and simulation.peak_memory == peaks
        later = Execution(one).run(CostTables.build(one.placement, costs), ended)
        assert list(later.ended) == one_at_a_time.run(one, costs, ended)[2]
    held = [max(one_at_a_time.held_after_each(schedule, rank, costs)) for rank in range(6)]
    assert list(peaks) == held


@pytest.mark.parametrize("mode", ["replicate", "shard_grad_op"])
@pytest.mark.parametrize("name", HAND_MADE)
def test_what_is_gathered_once_and_reduced_is_simulated_without_writing_it_down(name: str, mode: ShardingMode) -> None:
    num_stages = 4 * schedule_family(name).default_stages_per_rank
    costs = uneven(num_stages)
    schedule = build_schedule(name, num_ranks=4, num_microbatches=9, costs=costs)
    written = gathered_whole(schedule, mode)
    simulation = written.simulate(costs)
    length = simulation.makespan, max(simulation.span_ms)
    assert step_length(with_last_split(schedule), costs) == pytest.approx(length, abs=1e-9)
    assert step_length(with_last_split(written), costs) == pytest.approx(length, abs=1e-9)


def mutated(schedule: Schedule, draw: random.Random) -> Schedule:
    """``schedule`` with something changed in one program, which may or may not be wrong."""
    rank = draw.randrange(len(schedule.programs))
    program = CodedProgram.of(schedule.programs[rank], schedule.placement.num_stages, schedule.num_microbatches)
    codes = program.codes.tolist()
    one, other = draw.randrange(len(codes)), draw.randrange(len(codes))
    change = draw.choice(["swap", "swap neighbours", "leave out", "double", "another", "move"])
    if change == "swap":
        codes[one], codes[other] = codes[other], codes[one]
    elif change == "swap neighbours":
        one = min(one, len(codes) - 2)
        codes[one], codes[one + 1] = codes[one + 1], codes[one]
    elif change == "leave out":
        del codes[one]
    elif change == "double":
        codes.insert(other, codes[one])
    elif change == "another":
        codes[one] = draw.randrange(4 * schedule.placement.num_stages * schedule.num_microbatches)
    else:
        codes.insert(other, codes.pop(one))
    changed = program.with_codes(np.array(codes))
    return replace(schedule, programs=(*schedule.programs[:rank], changed, *schedule.programs[rank + 1 :]))


def error_of(schedule: Schedule, limits: tuple[float, ...] | None) -> str | None:
    """What validation says against ``schedule``."""
    try:
        schedule.validate(memory_limit=limits)
    except ScheduleError as error:
        return str(error)
    return None


@pytest.mark.by_day(5)
@pytest.mark.parametrize("name", HAND_MADE)
def test_what_is_refused_cannot_be_run_and_what_passes_can(name: str) -> None:
    draw = random.Random(name)
    verdicts = []
    for _ in range(60):
        num_ranks, num_microbatches, whole = draw.randint(2, 4), draw.randint(2, 6), draw.random() < 0.3
        schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, whole_batch_loss=whole)
        schedule = mutated(schedule, draw)
        limits = None if draw.random() < 0.5 else (float(draw.randint(3, 12)),) * num_ranks
        action_by_action = replace(schedule, programs=tuple(map(tuple, schedule.programs)))
        error = error_of(action_by_action, limits)
        assert error_of(schedule, limits) == error
        assert one_at_a_time.keeps_rules(schedule, UNIT_COSTS, limits) == (error is None)
        verdicts.append(error is None)
    assert True in verdicts and False in verdicts


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("1f1b", 3 * (700 + 255)),
        ("gpipe", 3 * (700 + 255)),
        ("zb_h1", 3 * 700 + 255),  # (p - 1) * (f + i - w)
        ("zb_h2", 3 * 700),
        ("zb_v", 6 * 700),
        ("dualpipe_v", 6 * 700 + 255),
    ],
)
def test_bubbles_of_hundreds_of_ranks_are_those_of_the_formulas(name: str, span: int) -> None:
    schedule = build_schedule(name, num_ranks=256, num_microbatches=700).validate()
    assert max(schedule.simulate().span_ms) == span


def test_many_actions_of_interleaved_zb_have_the_warm_up_that_holds_less() -> None:
    schedule = build_schedule("interleaved_zb", num_ranks=256, num_microbatches=768).validate()
    simulation = schedule.simulate()
    assert max(simulation.span_ms) == 6 * 768 + 255  # p - 1 with F, I and W of 1, as interleaved 1F1B with split W
    assert simulation.peak_memory == (255 + 256 + 1,) * 256  # (p - 1) + (v - 1) * p + 1


def test_coded_programs_are_like_tuples_of_actions() -> None:
    coded = build_schedule("zb_h1", num_ranks=3, num_microbatches=5).programs[1]
    plain = tuple(coded)
    assert coded == plain and plain == coded and hash(coded) == hash(plain)
    assert coded[2] == plain[2] and coded[-1] == plain[-1] and coded[1:4] == plain[1:4] and len(coded) == len(plain)
    assert pickle.loads(pickle.dumps(coded)) == coded
    assert coded != plain[:-1] and Placement.interleaved(3) != coded
