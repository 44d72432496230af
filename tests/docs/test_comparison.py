"""The comparison names for every cell what was read."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "start" / "comparison.md").read_text()
READ = set(re.findall(r"^\| ([A-Z]\d*) \| .*\| [\w.]+ \|$", PAGE, re.MULTILINE))
ROWS = re.findall(r"^\| (\d+)\. (.*) \|$", PAGE, re.MULTILINE)


def test_there_are_thirty_rows_of_five_libraries() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 31))
    assert {len(row.split(" | ")) for _, row in ROWS} == {6}


def test_every_cell_about_another_library_names_a_page_or_says_that_none_was_found() -> None:
    for number, row in ROWS:
        for letter, cell in zip("TNDL", row.split(" | ")[2:], strict=True):
            named = set(re.findall(r"\[([A-Z]\d*)\]", cell))
            assert named <= READ, f"row {number}: {named - READ} are not in the list of what was read"
            assert all(name.startswith(letter) for name in named), f"row {number}: {cell}"
            assert named or "not found" in cell, f"row {number}: {cell}"


def test_every_page_that_was_read_is_named_in_a_cell() -> None:
    assert set(re.findall(r"\[([A-Z]\d*)\]", PAGE)) == READ
