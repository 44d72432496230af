"""A step as one page to zoom into: planned beside measured. It contains all its data, and needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import ActionKind, Schedule
from lightning_pp.telemetry.timeline.recorded import RecordedStep
from lightning_pp.telemetry.timeline.step import NAMES_OF_KINDS, Timeline

# the zero-bubble papers' colours: F blue, I cyan, W green
COLORS = {
    ActionKind.F: "#3b6fb6",
    ActionKind.I: "#4fb3c4",
    ActionKind.W: "#5aa05f",
    ActionKind.B: "#7a63ad",
    ActionKind.OFFLOAD: "#b5a642",
    ActionKind.RELOAD: "#d1c77a",
    ActionKind.UNSHARD: "#e39b33",
    ActionKind.RESHARD: "#666666",
    ActionKind.REDUCE: "#c8553d",
}
_FORMAT = "lightning_pp.timeline/2"
_LEAST_TICKS = 1e5  # in the span of a step
_LARGEST_TICK = 1e-3


def html_timeline(step: Timeline | RecordedStep) -> str:
    """A page that shows a step: a row a rank, to zoom and pan, with what is known of each action under the pointer.

    About 10 bytes an action and view, and as many once.

    Args:
        step: A step, which is shown planned beside measured; or one timeline.
    """
    data = page_data(step)
    parts = {
        "title": escape(f"{data['program']['name']}, {data['program']['num_microbatches']} microbatches"),
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        # "</script>" in a name would end the element
        "data": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
    }
    page = _asset("page.html")
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part, 1)
    return page


def page_data(step: Timeline | RecordedStep) -> dict[str, Any]:
    """What the page shows, as it lies in it.

    Returns:
        ``program``: the name of the schedule, the stages and the actions of each rank, as ``0F3 1F0`` (stage, kind,
        microbatch). ``step``: the number of the step, and ``views``. A view has the times of each rank as whole numbers
        of ``tick`` (in ``unit``), four for each action of the program: how long after the end of the one before the
        rank came to it, how long it worked before it needed other stages, how long it waited for them, and how long it
        worked then. The other actions, in ``sharding``, have two: when they began, and how long they took.
    """
    views = [("", step)] if isinstance(step, Timeline) else [("planned", step.planned), ("measured", step.measured)]
    tick = _tick(max(timeline.span_ms for _, timeline in views))
    return {
        "format": _FORMAT,
        "unit": views[0][1].unit,
        "kinds": {kind.value: {"name": NAMES_OF_KINDS[kind], "color": color} for kind, color in COLORS.items()},
        "program": _program(views[0][1].schedule),
        "step": None if isinstance(step, Timeline) else step.step,
        "tick": tick,
        "views": [_view(name, timeline, tick) for name, timeline in views],
    }


def _program(schedule: Schedule) -> dict[str, Any]:
    def of_ranks(*, computing: bool) -> list[str]:
        return [" ".join(str(a) for a in program if a.kind.is_compute is computing) for program in schedule.programs]

    return {
        "name": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "rank_of_stage": list(schedule.placement.rank_of_stage),
        "ranks": of_ranks(computing=True),
        "sharding": of_ranks(computing=False),
    }


def _tick(span: float) -> float:
    """The power of ten in which a step's times are whole numbers, at least 100,000 in it."""
    return min(_LARGEST_TICK, 10.0 ** math.floor(math.log10(span / _LEAST_TICKS))) if span > 0 else _LARGEST_TICK


def _view(name: str, timeline: Timeline, tick: float) -> dict[str, Any]:
    return {
        "name": name,
        "bubbles": [round(timeline.bubble_fraction(rank), 4) for rank in range(len(timeline.ranks))],
        "ranks": [_row(times, tick) for times in timeline.ranks],
        "sharding": [
            [number for moment in times for number in (round(moment.start_ms / tick), round(moment.work_ms / tick))]
            for times in timeline.sharding
        ],
    }


def _row(times: Sequence[ActionTimes], tick: float) -> list[int]:
    """Differences of rounded moments, so that nothing adds up over a row."""
    row: list[int] = []
    before = 0
    for moment in times:
        asked, waiting, start, end = (
            round(at / tick)
            for at in (moment.asked_ms, moment.asked_ms + moment.early_ms, moment.start_ms, moment.end_ms)
        )
        row += (asked - before, waiting - asked, start - waiting, end - start)
        before = end
    return row


@cache
def _asset(name: str) -> str:
    return (files("lightning_pp.telemetry.timeline") / "page" / name).read_text(encoding="utf-8")
