"""Spans for many costs at once, against one simulation for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Schedule, StageCosts, available_schedules, build_schedule
from lightning_pp.schedule.registry import schedule_family
from lightning_pp.schedule.sharding import Sharding, insert_sharding
from lightning_pp.schedule.simulation import simulate
from lightning_pp.schedule.simulation.simulate import LongestSpans, step_length

HAND_MADE = [name for name in available_schedules() if not schedule_family(name).is_search]


def drawn(schedule: Schedule, number: int) -> np.ndarray:
    """Times of F, I and W; some are zero."""
    draw = np.random.default_rng(number)
    shape = (3, number, schedule.placement.num_stages)
    return draw.uniform(0.1, 20.0, shape) * (draw.uniform(size=shape) > 0.05)


def one_by_one(schedule: Schedule, times: np.ndarray) -> list[float]:
    costs = [StageCosts(*(kind[index].tolist() for kind in times)) for index in range(times.shape[1])]
    return [step_length(schedule, one)[1] for one in costs]


@pytest.mark.by_day(40)
@pytest.mark.parametrize("whole_batch_loss", [False, True])
@pytest.mark.parametrize("sizes", [(1, 3), (2, 1), (4, 7), (5, 16)])
@pytest.mark.parametrize("name", HAND_MADE)
def test_spans_are_those_of_one_simulation_for_each(name: str, sizes: tuple[int, int], whole_batch_loss: bool) -> None:
    schedule = build_schedule(name, num_ranks=sizes[0], num_microbatches=sizes[1], whole_batch_loss=whole_batch_loss)
    times = drawn(schedule, 9)
    spans = LongestSpans(schedule)
    assert spans.of(times).tolist() == one_by_one(schedule, times)
    assert spans.of(times[:, :0]).tolist() == []


def test_as_many_are_taken_at_once_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = build_schedule("zb_v", num_ranks=3, num_microbatches=6)
    times = drawn(schedule, 10)
    monkeypatch.setattr(simulate, "_MOST_NUMBERS", 4 * 3 * 6 * 6)
    spans = LongestSpans(schedule)
    assert 1 < spans.most_at_once < 5
    assert spans.of(times).tolist() == one_by_one(schedule, times)


def test_actions_of_sharding_take_no_time() -> None:
    plain = build_schedule("interleaved_1f1b", num_ranks=3, num_microbatches=6)
    units = tuple((f"{stage}",) for stage in range(6))
    sharded = insert_sharding(plain, Sharding("full_shard", units, {unit: 1 for (unit,) in units}))
    assert sum(map(len, sharded.programs)) > sum(map(len, plain.programs))
    times = drawn(sharded, 5)
    assert LongestSpans(sharded).of(times).tolist() == one_by_one(sharded, times)


def test_a_rank_that_waits_for_ever_is_named() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    first, second = schedule.programs
    with pytest.raises(ScheduleError, match="1f1b deadlocks: rank 0 waits for ever before 0B0"):
        LongestSpans(replace(schedule, programs=(first[1:], tuple(second))))
