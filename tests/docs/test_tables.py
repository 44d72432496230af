"""Tables are read at a glance: no cell of the pages on training and running has more than thirty words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_code_blocks import DOCS

MOST_WORDS = 30
#: The cells of the page on metrics are those of ``lightning_pp.telemetry.metric_table``.
PAGES = [page for page in sorted(DOCS.glob("*ing/*.md")) if page.stem != "metrics"]


def cells(page: Path) -> list[str]:
    """The cells of all tables of a page, without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^ *\|(.*)\|$", text, re.MULTILINE)
    return [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_cells_are_short(page: Path) -> None:
    assert not [cell for cell in cells(page) if len(cell.split()) > MOST_WORDS]


def test_pages_with_tables_are_looked_at() -> None:
    assert len(PAGES) >= 13 and sum(len(cells(page)) for page in PAGES) > 500
