"""The simulator against figures worked out by hand."""

from __future__ import annotations

import pytest

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Action, Placement, Schedule, StageCosts, build_schedule


def program(*rows: str, num_microbatches: int = 1, placement: Placement | None = None) -> Schedule:
    return Schedule(
        "hand",
        placement or Placement.interleaved(len(rows)),
        num_microbatches,
        tuple(tuple(map(Action.parse, row.split())) for row in rows),
    )


def test_transfers_are_paid_between_ranks_only() -> None:
    costs = StageCosts(forward=[1, 2, 3, 4], backward_input=[1, 1, 2, 2], backward_weight=1, p2p=[0.5, 0.25, 0.125, 9])
    v = program("0F0 3F0 3B0 0B0", "1F0 2F0 2I0 2W0 1B0", placement=Placement.v_shaped(2))
    simulation = v.simulate(costs)
    # 0F0 1, +.5, 1F0 3.5, 2F0 6.5, +.125, 3F0 10.625, 3B0 13.625, +9, 2I0 24.625, 2W0 25.625, 1B0 27.625, +.25, 0B0
    assert simulation.end_ms == ((1, 10.625, 13.625, 29.875), (3.5, 6.5, 24.625, 25.625, 27.625))
    assert simulation.makespan == 29.875
    assert simulation.work_ms == (10, 10)
    assert simulation.span_ms == (29.875, 26.125)
    assert tuple(simulation.bubble_fraction) == pytest.approx((1 - 10 / 29.875, 1 - 10 / 26.125))
    assert simulation.bubble_fraction == pytest.approx(1 - 10 / 29.875)
    cell = simulation.timeline[1][2]
    assert (str(cell.action), cell.start_ms, cell.end_ms) == ("2I0", 22.625, 24.625)


def test_gradients_may_take_another_time_than_values() -> None:
    """Stage 1 is on a node with stage 0, and stage 2 on another."""
    program_of_three = program("0F0 0B0", "1F0 1B0", "2F0 2B0")
    there, back = [0.1, 5.0, 0.0], [0.0, 0.1, 5.0]
    simulation = program_of_three.simulate(StageCosts(1, 1, 1, p2p=there, p2p_back=back))
    # 0F0 1, +.1, 1F0 2.1, +5, 2F0 8.1, 2B0 10.1, +5, 1B0 17.1, +.1, 0B0
    assert [ends[-1] for ends in simulation.end_ms] == pytest.approx([19.2, 17.1, 10.1])
    both = program_of_three.simulate(StageCosts(1, 1, 1, p2p=[0.1, 5.0, 5.0]))
    assert both.makespan == pytest.approx(19.2 - 0.1 + 5.0)


def test_memory_follows_forward_input_and_weight() -> None:
    schedule = program("0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2", num_microbatches=3)
    assert schedule.simulate(StageCosts(1, 1, 1)).peak_memory == (3,)
    assert schedule.simulate(StageCosts(1, 1, 1, held_after_forward=4, held_after_input=1)).peak_memory == (9,)
    assert schedule.simulate(StageCosts(1, 1, 1, held_after_forward=1, held_after_input=2)).peak_memory == (5,)


def test_sharding_actions_run_beside_the_computation() -> None:
    costs = StageCosts(1, 1, 1, gather=5, reduce=2)
    written = program("0UNSHARD 0F0 0I0 0W0 0RESHARD 0REDUCE_GRAD").simulate(costs)
    assert written.start_ms == ((0, 5, 6, 7, 8, 8),)
    assert written.makespan == 10
    assert written.span_ms == (3,)
    assert written.bubble_fraction == 0 and list(written.bubble_fraction) == [0]
    implied = program("0F0 0I0 0W0").simulate(costs)
    assert (implied.start_ms, implied.makespan) == (((5, 6, 7),), 10)


def test_implied_gathers_queue_in_the_order_of_use() -> None:
    costs = StageCosts(1, 1, 1, gather=[2, 3], reduce=[1, 4])
    both = program("0F0 1F0 1B0 0B0", placement=Placement(1, (0, 0))).simulate(costs)
    assert both.start_ms == ((2, 5, 6, 8),)
    assert both.makespan == 13  # stage 1 is reduced from 8 to 12, stage 0 queues behind it


def test_deadlock_and_wrong_costs_raise() -> None:
    with pytest.raises(ScheduleError, match="hand deadlocks: rank 0 waits for ever before 0B0"):
        program("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", num_microbatches=2).simulate()
    with pytest.raises(ScheduleError, match="has 3 numbers for 2 stages"):
        build_schedule("1f1b", num_ranks=2, num_microbatches=2).simulate(StageCosts([1, 1, 1], 1, 1))


def test_no_costs_means_one_millisecond_each() -> None:
    assert build_schedule("1f1b", num_ranks=1, num_microbatches=4).simulate().makespan == 12
