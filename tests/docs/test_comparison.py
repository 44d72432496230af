"""The comparison names for every cell what was read."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "start" / "comparison.md").read_text()
READ = set(re.findall(r"^\| ([A-Z]\d*) \| .*\| [\w.]+ \|$", PAGE, re.MULTILINE))
FIRST, SECOND = re.split(r"^## d9d.*$", PAGE.partition("## In short")[0], flags=re.MULTILINE)
NUMBERED = r"^\| (\d+)\. (.*) \|$"
ROWS = re.findall(NUMBERED, FIRST, re.MULTILINE)
OTHERS = re.findall(NUMBERED, SECOND, re.MULTILINE)


def test_rows_are_numbered_and_have_a_cell_for_each_library() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 35))
    assert {len(row.split(" | ")) for _, row in ROWS} == {6}
    numbers = [int(number) for number, _ in OTHERS]
    assert numbers == sorted(numbers) and set(numbers) <= set(range(1, 35))
    assert {len(row.split(" | ")) for _, row in OTHERS} == {4}


def test_every_cell_about_another_library_names_a_page_or_says_that_none_was_found() -> None:
    cells = [(number, "TNDL", row.split(" | ")[2:]) for number, row in ROWS]
    cells += [(number, "ZMR", row.split(" | ")[1:]) for number, row in OTHERS]
    for number, letters, row in cells:
        for letter, cell in zip(letters, row, strict=True):
            named = set(re.findall(r"\[([A-Z]\d*)\]", cell))
            assert named <= READ, f"row {number}: {named - READ} are not in the list of what was read"
            assert all(name.startswith(letter) for name in named), f"row {number}: {cell}"
            assert named or "not found" in cell, f"row {number}: {cell}"


def test_every_page_that_was_read_is_named_in_a_cell() -> None:
    assert set(re.findall(r"\[([A-Z]\d*)\]", PAGE)) == READ
