"""OFFLOAD and RELOAD in programs: where they are put, what they take, and what ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Action, ActionKind, Placement, Schedule, Sharding, StageCosts, build_schedule
from lightning_pp.schedule.fewer_microbatches import keep_first_microbatches
from lightning_pp.schedule.offloading import with_offloading
from lightning_pp.schedule.sharding import insert_sharding

FAMILIES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "interleaved_1f1b", "interleaved_zb")


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def on_one_rank(text: str) -> Schedule:
    program = actions(text)
    number = max(action.microbatch or 0 for action in program) + 1
    return Schedule("by hand", Placement.interleaved(1), number, (program,))


def offloaded(
    name: str, copy_ms: float, *, num_ranks: int = 4, num_microbatches: int = 12
) -> tuple[Schedule, StageCosts]:
    schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    costs = StageCosts(1.0, 1.2, 0.8, held_after_forward=5.0, held_after_input=2.0, offload=copy_ms, held_on_host=4.5)
    return with_offloading(schedule, costs), costs


def highest(program: Sequence[Action], share: float) -> float:
    """Counted microbatch by microbatch, for the costs of :func:`offloaded`."""
    held: dict[tuple[int, int | None], float] = {}
    most = 0.0
    for action in program:
        whose = action.stage, action.microbatch
        after = {"F": 5.0, "I": 2.0, "W": 0.0, "B": 0.0, "OFFLOAD": 5.0 - share * 4.5, "RELOAD": 5.0}
        held[whose] = after[action.kind.value]
        most = max(most, sum(held.values()))
    return most


@pytest.mark.parametrize("copy_ms", [0.0, 0.7, 1.3, 3.0, 9.0])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_takes_longer_and_no_rank_holds_more(name: str, copy_ms: float) -> None:
    schedule, costs = offloaded(name, copy_ms)
    plain = build_schedule(name, num_ranks=4, num_microbatches=12)
    schedule.validate(costs=costs)
    before, after = plain.simulate(costs), schedule.simulate(costs)
    assert after.makespan == pytest.approx(before.makespan, rel=1e-9)
    assert schedule.time_in_a_row(costs) <= plain.time_in_a_row(costs) * (1 + 1e-9)
    for rank, program in enumerate(schedule.programs):
        assert after.peak_memory[rank] <= before.peak_memory[rank]
        assert after.peak_memory[rank] == pytest.approx(highest(program, schedule.offload_shares[rank]))
        left = tuple(action for action in program if action.kind.is_compute)
        assert left == tuple(plain.programs[rank])


def test_early_ranks_hold_little_where_the_link_is_fast() -> None:
    schedule, costs = offloaded("1f1b", 0.9, num_ranks=8, num_microbatches=32)
    held = schedule.simulate(costs).peak_memory
    assert held[0] < 0.4 * 8 * 5.0
    assert held[7] == 5.0 and schedule.offload_shares[7] == 0.0  # the last rank begins its backward at once


def test_copies_run_beside_the_computation_and_are_waited_for() -> None:
    text = "0F0 0F1 0F2 0OFFLOAD0 0F3 0OFFLOAD1 0RELOAD0 0I3 0RELOAD1 0W3 0I2 0W2 0I1 0W1 0I0 0W0"
    costs = StageCosts(1.0, 1.0, 1.0, held_after_input=0.0, offload=2.5, held_on_host=1.0)
    simulation = on_one_rank(text).validate().simulate(costs)
    times = {str(timed.action): (timed.start_ms, timed.end_ms) for timed in simulation.timeline[0]}
    assert times["0OFFLOAD0"] == (1.0, 3.5)  # it starts when its F has ended
    assert times["0F3"] == (3.5, 4.5)  # and what follows it waits
    assert times["0OFFLOAD1"] == (3.5, 6.0)  # copies of one direction follow each other
    assert times["0RELOAD0"] == (6.0, 8.5)
    assert times["0I3"] == (6.0, 7.0)
    assert times["0RELOAD1"] == (8.5, 11.0)
    assert times["0I1"] == (11.0, 12.0)
    assert simulation.peak_memory == (3.0,)


def test_a_share_of_the_bytes_takes_that_share_of_the_time() -> None:
    costs = StageCosts(1.0, 1.0, 1.0, held_after_forward=4.0, held_after_input=1.0, offload=2.0, held_on_host=4.0)
    program = actions("0F0 0F1 0OFFLOAD0 0F2 0B2 0RELOAD0 0B1 0B0")
    whole = Schedule("by hand", Placement.interleaved(1), 3, (program,))
    half = Schedule("by hand", Placement.interleaved(1), 3, (program,), offload_shares=(0.5,))
    ends = [{str(t.action): t.end_ms for t in each.simulate(costs).timeline[0]} for each in (whole, half)]
    assert [end["0OFFLOAD0"] for end in ends] == [3.0, 2.0]
    assert [each.simulate(costs).peak_memory for each in (whole, half)] == [(8.0,), (10.0,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0OFFLOAD0 0B0", "0OFFLOAD0 has no RELOAD"),
        ("0F0 0RELOAD0 0B0", "0RELOAD0 has no OFFLOAD"),
        ("0OFFLOAD0 0F0 0RELOAD0 0B0", "0OFFLOAD0 comes too early: it needs 0F0"),
        ("0F0 0RELOAD0 0OFFLOAD0 0B0", "0RELOAD0 comes too early: it needs 0OFFLOAD0"),
        ("0F0 0OFFLOAD0 0I0 0RELOAD0 0W0", "0I0 comes too early: it needs 0RELOAD0"),
        ("0F0 0OFFLOAD0 0OFFLOAD0 0RELOAD0 0B0", "repeated"),
    ],
)
def test_programs_that_cannot_run_are_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        on_one_rank(text).validate()


def test_a_microbatch_has_to_be_named() -> None:
    with pytest.raises(ScheduleError, match="lacks its microbatch"):
        Action.parse("0OFFLOAD")


def test_programs_are_written_and_read(tmp_path: Path) -> None:
    schedule, _ = offloaded("zb_v", 0.7)
    schedule.to_csv(tmp_path / "program.csv")
    found = Schedule.from_csv(tmp_path / "program.csv")
    assert found.offloads and [*map(tuple, found.programs)] == [*map(tuple, schedule.programs)]


@pytest.mark.parametrize("mode", ["replicate", "shard_grad_op", "full_shard"])
def test_gathers_and_fewer_microbatches_leave_them(mode: str) -> None:
    schedule, costs = offloaded("zb_v", 0.7)
    sharding = Sharding(mode, tuple((str(stage),) for stage in range(8)), {str(stage): 3 for stage in range(8)})
    sharded = keep_first_microbatches(insert_sharding(schedule, sharding), 7).validate(costs=costs)
    copies = [[a for a in p if a.kind in (ActionKind.OFFLOAD, ActionKind.RELOAD)] for p in sharded.programs]
    fewer = keep_first_microbatches(schedule, 7)
    assert copies == [[a for a in p if a.kind in (ActionKind.OFFLOAD, ActionKind.RELOAD)] for p in fewer.programs]
    assert any(copies)
    sharded.simulate(costs)
