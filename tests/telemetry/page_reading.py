"""Reads a timeline page back, apart from the code that writes and draws it."""

from __future__ import annotations

import json
import re
from typing import Any

# (asked, begun to wait, start, end), in the page's unit
Times = tuple[float, float, float, float]


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    assert data["format"] == "lightning_pp.timeline/2"
    return data


def view_of(data: dict[str, Any], name: str) -> list[list[tuple[str, Times]]]:
    """For each rank its actions and their times, of one view."""
    (view,) = [view for view in data["views"] if view["name"] == name]
    ranks = []
    for text, row in zip(data["program"]["ranks"], view["ranks"], strict=True):
        names = text.split(" ")
        assert len(row) == 4 * len(names)
        now, times = 0, []
        for index in range(0, len(row), 4):
            moments = []
            for number in row[index : index + 4]:
                now += number
                moments.append(now * data["tick"])
            times.append((moments[0], moments[1], moments[2], moments[3]))
        ranks.append(list(zip(names, times, strict=True)))
    return ranks
