"""Cells of tables stay short: what takes more words is told in a paragraph."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_WORDS = 30
FOLDERS = ["inside", "running", "start", "training"]
PAGES = [ROOT / "README.md"]
PAGES += sorted(page for each in FOLDERS for page in (ROOT / "docs" / each).glob("*.md"))


def cells(page: Path) -> list[str]:
    """The cells of the tables of a page, with links as their text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    rows = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    return [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row.strip("|"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_cell_has_more_words_than_are_read_at_once(page: Path) -> None:
    long = {cell: len(cell.split()) for cell in cells(page) if len(cell.split()) > MOST_WORDS}
    assert long == {}


def test_pages_with_tables_are_looked_at() -> None:
    assert len(PAGES) >= 26 and sum(len(cells(page)) for page in PAGES) > 2000
