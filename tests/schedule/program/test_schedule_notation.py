"""Actions as text and schedules as CSV, ours and torch's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import (
    Action,
    ActionKind,
    Placement,
    Schedule,
    available_schedules,
    build_forward_only,
    build_schedule,
)


@pytest.mark.parametrize("text", ["3F0", "3I0", "3W12", "0B7", "11UNSHARD", "0RESHARD", "2REDUCE_GRAD"])
def test_action_text_is_torchs(text: str) -> None:
    action = Action.parse(text)
    assert str(action) == text == str(_Action.from_str(text))
    assert hash(action) == hash(Action.parse(f" {text} "))


def test_reduce_is_read_in_both_spellings() -> None:
    assert Action.parse("2REDUCE") == Action.parse("2REDUCE_GRAD") == Action(2, ActionKind.REDUCE)


@pytest.mark.parametrize(
    ("text", "culprit"), [("F0", "not an action"), ("3X0", "unknown kind 'X'"), ("3F", "lacks its microbatch")]
)
def test_action_text_errors(text: str, culprit: str) -> None:
    with pytest.raises(ScheduleError, match=culprit):
        Action.parse(text)


def test_placements() -> None:
    plain, looped, v = Placement.interleaved(3), Placement.interleaved(2, 3), Placement.v_shaped(3)
    assert (plain.rank_of_stage, plain.kind) == ((0, 1, 2), "one chunk")
    assert (looped.stages_of_rank(1), looped.kind) == ((1, 3, 5), "interleaved")
    assert (v.rank_of_stage, v.stages_of_rank(0), v.kind) == ((0, 1, 2, 2, 1, 0), (0, 5), "V")
    with pytest.raises(ScheduleError, match="rank 1 holds no stage"):
        Placement(2, (0, 0))


def torch_runtime(schedule: Schedule) -> _PipelineScheduleRuntime:
    """A runtime of torch that has never seen a process group: enough to load and check a CSV file."""
    stage = SimpleNamespace(
        num_stages=schedule.placement.num_stages,
        group_size=schedule.placement.num_ranks,
        group_rank=0,
        stage_index_to_group_rank=None,
    )
    return _PipelineScheduleRuntime([stage], schedule.num_microbatches)


@pytest.mark.parametrize("name", list(available_schedules()))
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_interchange_with_torch(name: str, num_microbatches: int, tmp_path: Path) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=num_microbatches)
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    schedule.to_csv(ours)
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(ours), format="compute_only")
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement.rank_of_stage))
    runtime._dump_csv(str(theirs), format="compute_only")
    assert Schedule.from_csv(theirs, name=schedule.name) == schedule
    runtime._dump_csv(str(theirs), format="compute_comms")  # with SEND, RECV, UNSHARD, RESHARD and REDUCE_GRAD
    read = Schedule.from_csv(theirs)
    assert [[a for a in program if a.kind.is_compute] for program in read.programs] == [
        list(program) for program in schedule.programs
    ]
    assert any(action.kind is ActionKind.UNSHARD for program in read.programs for action in program)


def test_overlapped_pairs_and_empty_cells_are_read(tmp_path: Path) -> None:
    path = tmp_path / "overlap.csv"
    path.write_text("0F0,,0F1,0B0,0B1\n,1F0,(1B0;1F1)OVERLAP_F_B,1B1,\n")
    schedule = Schedule.from_csv(path)
    assert schedule.csv_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (schedule.num_microbatches, schedule.placement) == (2, Placement.interleaved(2))
    assert not schedule.splits_backward


def test_what_torch_2_15_writes_is_read(tmp_path: Path) -> None:
    """Two rows of its own 1F1B with messages, as ``_dump_csv(format="compute_comms")`` gives them."""
    path = tmp_path / "waits.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0\n"
    )
    schedule = Schedule.from_csv(path)
    assert schedule.csv_text() == "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1F0,1B0,1REDUCE_GRAD,1RESHARD\n"
    assert Schedule.from_csv(path).csv_text(with_waits=True).count("0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD") == 1


def test_forward_only_round_trip(tmp_path: Path) -> None:
    schedule = build_forward_only(Placement.v_shaped(2), 3)
    schedule.to_csv(tmp_path / "eval.csv")
    read = Schedule.from_csv(tmp_path / "eval.csv", name="forward_only")
    assert read == schedule
    assert read.forward_only
    assert not build_schedule("gpipe", num_ranks=2, num_microbatches=1).forward_only
