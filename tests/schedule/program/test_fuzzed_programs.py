"""Files of programs with random mistakes: a schedule that can be run, or a sentence that names the file and place."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_strategies import built_schedules

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Schedule
from lightning_pp.schedule.program.notation import read_csv

FUZZED = settings(
    max_examples=200,
    deadline=timedelta(seconds=10),  # of one file: none takes long to refuse
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# cells that look like actions, numbers that are too large, and characters that spreadsheets and editors leave behind
STRANGE = st.one_of(
    st.sampled_from(
        [
            *("", " ", "F", "0", "0F", "F0", "-1F0", "0F-1", "0X0", "0F0.5", "0f0", "1e3F0", "0F0 0B0", "0UNSHARD"),
            *("0RESHARD", "1REDUCE_GRAD", "0UNSHARD3", "0SEND_F0", "(0F1;0B0)OVERLAP_F_B", "(0F1)OVERLAP_F_B"),
            *("()OVERLAP_F_B", "((0F0;0B0)OVERLAP_F_B;0W0)OVERLAP_F_B", "99999999999F0", "0F99999999999"),
            *(f"{'9' * 5000}F0", "٣F٣", "\ufeff0F0", "0F0\x00", '"0F0', "0F0\r", "=0F0", "None", "0OVERLAP_F_B"),
        ]
    ),
    st.builds(lambda s, kind, m: f"{s}{kind}{m}", st.integers(0, 9), st.sampled_from("FIWB"), st.integers(0, 13)),
    st.text(max_size=8),
)


@st.composite
def edited_files(draw: st.DrawFn) -> str:
    """The file of a valid schedule, after some edits of cells and rows."""
    schedule, _, _ = draw(built_schedules(most_ranks=3))
    rows = [line.split(",") for line in schedule.csv_text().splitlines()]
    for _ in range(draw(st.integers(0, 3))):
        if not rows:
            break
        row = draw(st.sampled_from(rows))
        column = draw(st.integers(0, max(0, len(row) - 1)))
        edit = draw(st.sampled_from(["replace", "insert", "delete", "swap", "copy_row", "delete_row", "move"]))
        if edit == "replace" and row:
            row[column] = draw(STRANGE)
        elif edit == "insert":
            row.insert(column, draw(STRANGE))
        elif edit == "delete" and row:
            del row[column]
        elif edit == "swap" and row:
            other = draw(st.integers(0, len(row) - 1))
            row[column], row[other] = row[other], row[column]
        elif edit == "move" and row:
            draw(st.sampled_from(rows)).append(row.pop(column))
        elif edit == "copy_row":
            rows.append(list(row))
        elif edit == "delete_row":
            rows.remove(row)
    return "\n".join(",".join(row) for row in rows)


def check(path: Path) -> None:
    """What can be read can be run, and reads again as it is; what cannot is told with the place of the mistake."""
    try:
        schedule = Schedule.from_csv(path)
    except ScheduleError as error:
        text = str(error)
        assert str(path) in text
        assert re.search(r"rank \d+, cell \d+|row \d+|is empty|cannot read|deadlock", text), text
        return
    simulation = schedule.simulate()
    assert simulation.makespan > 0
    again = path.with_suffix(".again.csv")
    schedule.to_csv(again)
    assert read_csv(again).programs == schedule.programs


@FUZZED
@given(text=edited_files())
def test_an_edited_file_is_a_schedule_or_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "edited.csv"
    path.write_bytes(text.encode(errors="surrogatepass"))
    check(path)


@FUZZED
@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_schedule_or_a_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bytes.csv"
    path.write_bytes(content)
    check(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0,99999999999F0\n", "rank 0, cell 2: '99999999999F0' has a number of more than 6 digits"),
        ("0F0,0B0,999999F0\n", "rank 0, cell 2: no row has actions of stage 1"),
        (f"{'9' * 5000}F0\n", "rank 0, cell 0"),
        (f"0F0,{'x' * 200_000}\n", "cannot read the schedule .*field larger than field limit"),
        ("0F0,0F999999\n", "rank 0, cell 2: 0F1 is missing"),
    ],
)
def test_numbers_and_cells_that_are_too_large(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=said) as caught:
        Schedule.from_csv(path)
    assert len(str(caught.value)) < 2000
