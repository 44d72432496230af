"""Where everything in a picture of a step stands, measured and simulated steps alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import ActionKind
from lightning_pp.telemetry.timeline.step import Timeline

# the zero-bubble papers' colours: F blue, I cyan, W green
COLORS = {
    ActionKind.F: "#3b6fb6",
    ActionKind.I: "#4fb3c4",
    ActionKind.W: "#5aa05f",
    ActionKind.B: "#7a63ad",
    ActionKind.UNSHARD: "#e39b33",
    ActionKind.RESHARD: "#666666",
    ActionKind.REDUCE: "#c8553d",
}
BUBBLE_COLOR, LINE_COLOR = "#ececec", "#999999"
ODD_OPACITY = 0.75
"""Odd microbatches are lighter, so that one can be told from the next."""

_MARGIN = 8
_LABEL_WIDTH, _DRAWING_WIDTH, _BUBBLE_WIDTH = 60, 1000, 100
_ROW_HEIGHT, _ROW_PITCH, _HEADER_HEIGHT, _AXIS_HEIGHT = 22, 28, 44, 26
_LATER_STAGE_INDENT = 6
_SHARDING_HEIGHT, _SHARDING_WIDTH = 4, 1.5
_DIGIT_WIDTH, _LEAST_ROOM = 6.5, 3.0
_BASELINE = 4
_MOST_TICKS = 12
_LEGEND_GAP, _LETTER_WIDTH = 18, 6.6

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Box:
    """An action, or a colour of the legend. Pixels from the top left corner.

    Attributes:
        kind: What gives it its colour.
        is_odd: Whether it is lighter.
        about: What hovering over it tells; empty for the legend.
    """

    left: float
    top: float
    width: float
    height: float
    kind: ActionKind
    is_odd: bool = False
    about: str = ""


@dataclass(frozen=True)
class Label:
    """A line of text; ``baseline`` is where its letters stand.

    Attributes:
        is_light: Whether it stands on a box.
    """

    left: float
    baseline: float
    text: str
    anchor: Anchor = "start"
    is_light: bool = False


@dataclass(frozen=True)
class Drawing:
    """A picture of a step: a row a rank, scaled by time.

    Attributes:
        width: Pixels.
        height: Pixels.
        title: What it shows.
        spans: Left, top, width and height of each rank's span, from its first action to its last: the bubbles are what
            the boxes leave of it.
        legend: A box for each kind of action.
        boxes: The actions.
        labels: All text.
        ticks: Left, top and height of the lines of the time axis.
    """

    width: int
    height: int
    title: str
    spans: tuple[tuple[float, float, float, float], ...]
    legend: tuple[Box, ...]
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]
    ticks: tuple[tuple[float, float, float], ...]


def draw(timeline: Timeline) -> Drawing:
    """Lays out ``timeline``; where a rank holds several stages, all but its first are lower."""
    num_ranks = len(timeline.ranks)
    rows_end = _HEADER_HEIGHT + _ROW_PITCH * num_ranks
    width, height = _LABEL_WIDTH + _DRAWING_WIDTH + _BUBBLE_WIDTH, rows_end + _AXIS_HEIGHT
    scale = _DRAWING_WIDTH / timeline.span_ms if timeline.span_ms else 0.0
    schedule = timeline.schedule
    title = (
        f"{schedule.name}, {schedule.num_microbatches} microbatches: one step of {timeline.span_ms:.1f} {timeline.unit}"
    )
    legend, legend_labels = _legend(timeline)
    labels = [Label(_LABEL_WIDTH, 15, title), *legend_labels]
    has_later_stages = schedule.placement.num_stages > num_ranks
    spans, boxes = [], []
    for rank, times in enumerate(timeline.ranks):
        top = _HEADER_HEIGHT + rank * _ROW_PITCH
        middle = top + _ROW_HEIGHT // 2 + _BASELINE
        labels.append(Label(_MARGIN, middle, f"rank {rank}"))
        labels.append(Label(width - _MARGIN, middle, f"{timeline.bubble_fraction(rank):.1%} bubble", "end"))
        if times:
            left, right = times[0].start_ms * scale, times[-1].end_ms * scale
            indent = _LATER_STAGE_INDENT if has_later_stages else 0
            spans.append((_LABEL_WIDTH + left, top + indent, right - left, _ROW_HEIGHT - indent))
        first_stage = schedule.placement.stages_of_rank(rank)[0]
        for moment in times:
            box = _box(moment, top, scale, timeline.unit, is_first_stage=moment.action.stage == first_stage)
            boxes.append(box)
            number = str(moment.action.microbatch)
            if box.width >= _DIGIT_WIDTH * len(number) + _LEAST_ROOM:
                middle_of_box = box.top + box.height / 2 + _BASELINE
                labels.append(Label(box.left + box.width / 2, middle_of_box, number, "middle", is_light=True))
    for rank, times in enumerate(timeline.sharding):
        top = _HEADER_HEIGHT + rank * _ROW_PITCH + _ROW_HEIGHT
        boxes += [_strip(moment, top, scale, timeline.unit) for moment in times]
    ticks, tick_labels = _axis(timeline, scale, rows_end)
    return Drawing(width, height, title, tuple(spans), legend, tuple(boxes), (*labels, *tick_labels), ticks)


def _box(moment: ActionTimes, top: int, scale: float, unit: str, *, is_first_stage: bool) -> Box:
    action = moment.action
    indent = 0 if is_first_stage else _LATER_STAGE_INDENT
    about = f"{action}: {moment.work_ms:.3g} {unit}, after {moment.wait_ms:.3g} {unit} of waiting"
    return Box(
        _LABEL_WIDTH + moment.start_ms * scale,
        top + indent,
        max((moment.end_ms - moment.start_ms) * scale, 0.2),
        _ROW_HEIGHT - indent,
        action.kind,
        (action.microbatch or 0) % 2 == 1,
        about,
    )


def _strip(moment: ActionTimes, top: int, scale: float, unit: str) -> Box:
    """What goes on beside the actions: below the row, as wide as it is long, or a mark where it was begun."""
    about = f"{moment.action}: {moment.work_ms:.3g} {unit} from {moment.start_ms:.4g} {unit}"
    width = max(moment.work_ms * scale, _SHARDING_WIDTH)
    return Box(_LABEL_WIDTH + moment.start_ms * scale, top, width, _SHARDING_HEIGHT, moment.action.kind, about=about)


def _legend(timeline: Timeline) -> tuple[tuple[Box, ...], list[Label]]:
    boxes, labels = [], []
    left = float(_LABEL_WIDTH)
    for kind, name in timeline.kinds().items():
        text = f"{kind.value} {name}"
        boxes.append(Box(left, 23, 11, 11, kind))
        labels.append(Label(left + 16, 33, text))
        left += 16 + _LETTER_WIDTH * len(text) + _LEGEND_GAP
    if timeline.schedule.placement.num_stages > timeline.schedule.placement.num_ranks:
        labels.append(Label(left, 33, "lower boxes: a rank's later stages; numbers: microbatches"))
    else:
        labels.append(Label(left, 33, "numbers: microbatches"))
    return tuple(boxes), labels


def _axis(timeline: Timeline, scale: float, top: int) -> tuple[tuple[tuple[float, float, float], ...], list[Label]]:
    if not timeline.span_ms:
        return (), []
    step = tick_step(timeline.span_ms, _MOST_TICKS)
    ticks, labels = [], []
    for number in range(math.floor(timeline.span_ms / step + 1e-9) + 1):
        left = _LABEL_WIDTH + number * step * scale
        ticks.append((left, float(top - 2), 5.0))
        text = f"{number * step:.10g}" + (f" {timeline.unit}" if number == 0 else "")
        labels.append(Label(left, top + 16, text, "middle"))
    return tuple(ticks), labels


def tick_step(span: float, most: int) -> float:
    """A round distance (1, 2 or 5 times a power of ten) between at most ``most`` ticks on ``span``."""
    least = span / most
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= least * (1 - 1e-9))
