"""What is refused, and how the error points at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Placement, Schedule, StageCosts, build_schedule

GOOD = ["0F0,0F1,0B0,0B1", "1F0,1I0,1F1,1B1,1W0"]


def load(tmp_path: Path, *rows: str, **sizes: int) -> Schedule:
    path = tmp_path / "program.csv"
    path.write_text("\n".join(rows) + "\n")
    return Schedule.from_csv(path, **sizes)


def refusal(tmp_path: Path, *rows: str, **sizes: int) -> str:
    with pytest.raises(ScheduleError) as info:
        load(tmp_path, *rows, **sizes)
    return str(info.value)


def test_good_file_is_accepted(tmp_path: Path) -> None:
    assert load(tmp_path, *GOOD, num_ranks=2, num_stages=2, num_microbatches=2).splits_backward


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1F0,1I0,1F1,1B1", "rank 1, cell 4: 1W0 is missing"),
        ("1F0,1I0,1F1,1W0", "rank 1, cell 3: 1I1 (or 1B1) is missing"),
        ("1F0,1I0,1B1,1W0", "rank 1, cell 2: 1F1 is missing"),
        ("1F0,1I0,1F1,1B1,1W0,1W0", "rank 1, cell 5: 1W0 is repeated: cell 4 already has it"),
        ("1F0,1I0,1F1,1B1,1W0,1W1", "rank 1, cell 5: 1W1 is repeated: 1B1 in cell 3 includes it"),
        ("1F0,0I0,1F1,1B1,1W0", "rank 1, cell 1: 0I0 is misplaced: stage 0 is on rank 0"),
        ("1I0,1F0,1F1,1B1,1W0", "rank 1, cell 0: 1I0 comes too early: it needs 1F0, which is in cell 1"),
        ("1F0,1I0,1F1,1V1,1W0", "rank 1, cell 3: '1V1' has the unknown kind 'V'"),
        ("1F0,1I0,1F1,hello,1W0", "rank 1, cell 3: 'hello' is not an action"),
        ("1F0,,,1I0,1F1,1B1,,1W0,1W0", "rank 1, cell 8: 1W0 is repeated"),
    ],
)
def test_bad_row_is_pointed_at(tmp_path: Path, row: str, message: str) -> None:
    text = refusal(tmp_path, GOOD[0], row)
    assert f"program.csv, {message}" in text
    assert "rank 0: " in text
    marked = [line for line in text.splitlines() if "[" in line and line.lstrip().startswith("rank 1: ")]
    assert len(marked) == 1


def test_wrong_sizes_are_all_named(tmp_path: Path) -> None:
    text = refusal(tmp_path, *GOOD, num_ranks=4, num_stages=8, num_microbatches=3)
    assert "it has 2 rows (ranks), the run has 4; it has 2 stages, the run has 8; it has 2 microbatches" in text
    assert "is empty" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"num_stages": 1}, "it has 2 stages, the run has 1"),
        ({"num_stages": 4}, "it has 2 stages, the run has 4"),
        ({"num_microbatches": 1}, "it has 2 microbatches, the run has 1"),
        ({"num_ranks": 1}, "it has 2 rows (ranks), the run has 1"),
    ],
)
def test_wrong_sizes_are_told(tmp_path: Path, sizes: dict[str, int], told: str) -> None:
    assert refusal(tmp_path, *GOOD, **sizes).endswith(f".csv does not fit: {told}")


@pytest.mark.parametrize(
    ("rows", "where", "marked"),
    [
        (["0F0,0B0", "2F0,2B0"], "rank 1, cell 0: no row has actions of stage 1", "[2F0]"),
        (["0F0,0B0", ",,"], "row 1 has no action", "[]"),
    ],
)
def test_missing_stages_are_pointed_at(tmp_path: Path, rows: list[str], where: str, marked: str) -> None:
    text = refusal(tmp_path, *rows)
    assert where in text
    drawn = text.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in drawn[1:]] == ["rank 0", "rank 1"]
    assert sum(marked in line for line in drawn) == 1


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"cannot read the schedule .*nowhere\.csv"):
        Schedule.from_csv(tmp_path / "nowhere.csv")


def test_deadlock_names_who_waits_for_whom(tmp_path: Path) -> None:
    text = refusal(tmp_path, "0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1")
    assert "deadlock: rank 0 before 0B0 (cell 1) waits for 1I or B0 of rank 1" in text
    assert "rank 1 before 1F1 (cell 1) waits for 0F1 of rank 0" in text
    assert "[0B0]" in text


def test_picture_shows_only_the_neighbourhood() -> None:
    schedule = build_schedule("zb_h1", num_ranks=8, num_microbatches=20)
    program = list(schedule.programs[4])
    program[30] = program[29]
    broken = Schedule("mine", schedule.placement, 20, (*schedule.programs[:4], tuple(program), *schedule.programs[5:]))
    with pytest.raises(ScheduleError) as info:
        broken.validate()
    lines = str(info.value).splitlines()
    assert lines[0].startswith("mine, rank 4, cell 30: ")
    assert [line.split(":")[0].strip() for line in lines[2:]] == [f"rank {rank}" for rank in range(2, 7)]
    assert f"[{program[30]}]" in lines[4]
    assert lines[4].count("4") < 40


def test_memory_limit() -> None:
    schedule = build_schedule("1f1b", num_ranks=4, num_microbatches=8)
    schedule.validate(memory_limit=4)
    schedule.validate(memory_limit=[4, 3, 2, 1])
    with pytest.raises(ScheduleError, match=r"rank 1, cell 2: the rank holds 3 after 1F2, but its memory limit is 2"):
        schedule.validate(memory_limit=[4, 2, 2, 1])
    with pytest.raises(ScheduleError, match="memory_limit has 2 numbers for 4 ranks"):
        schedule.validate(memory_limit=[4, 4])
    costs = StageCosts(1, 1, 1, held_after_forward=[3, 1, 1, 1])
    with pytest.raises(
        ScheduleError, match="the rank holds 9 after 0F2, but its memory limit is 8. This schedule needs 12"
    ):
        schedule.validate(costs=costs, memory_limit=8)
    with pytest.raises(ScheduleError, match="The smallest limit that works for it is 4"):
        build_schedule("1f1b", num_ranks=4, num_microbatches=8, memory_limit=3)


def test_wrong_microbatch_and_stage() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
    with pytest.raises(ScheduleError, match="of microbatch 2, but there are 2 microbatches"):
        Schedule("x", schedule.placement, 2, schedule.programs).validate()
    with pytest.raises(ScheduleError, match="of stage 1, but there are 1 stages"):
        Schedule("x", Placement.interleaved(1), 3, schedule.programs[1:]).validate()
    with pytest.raises(ScheduleError, match="programs for 2 ranks, its placement has 3"):
        Schedule("x", Placement.interleaved(3), 3, schedule.programs).validate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "2f2b"}, "unknown schedule '2f2b': choose one of .*gpipe.*1f1b.*zb_h1"),
        ({"num_microbatches": 0}, "num_microbatches is 0: a step has at least 1"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"stages_per_rank": 2}, "stages_per_rank is 2, but zb_h1 allows exactly 1"),
        ({"stages_per_rank": 0, "name": "gpipe"}, "stages_per_rank is 0, but gpipe allows 1 or more"),
        ({"costs": StageCosts([1, 2], 1, 1)}, "StageCosts.forward has 2 numbers for 4 stages"),
    ],
)
def test_bad_requests(arguments: dict[str, object], message: str) -> None:
    request: dict[str, object] = {"name": "zb_h1", "num_ranks": 4, "num_microbatches": 8, **arguments}
    with pytest.raises(ScheduleError, match=message):
        build_schedule(**request)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_costs(bad: float) -> None:
    with pytest.raises(ScheduleError, match=r"StageCosts\.backward_weight\[1\] is"):
        StageCosts(1, 1, [1, bad])
    with pytest.raises(ScheduleError, match="different numbers of stages"):
        _ = StageCosts([1, 1], [1, 1, 1], 1).num_stages
