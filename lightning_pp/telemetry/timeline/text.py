"""A step's timeline as letters in a terminal."""

from __future__ import annotations

from itertools import groupby

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import ActionKind, Placement
from lightning_pp.telemetry.timeline.step import Timeline

_GAP = "·"
# ANSI 256-colour backgrounds, for even and odd microbatches: F blue, I cyan, W green (the zero-bubble papers' colours)
_BACKGROUNDS = {
    ActionKind.F: (25, 32),
    ActionKind.I: (31, 38),
    ActionKind.W: (28, 34),
    ActionKind.B: (54, 61),
}
_MIN_COLUMNS = 10


def text_timeline(timeline: Timeline, *, width: int = 100, colors: bool = True) -> str:
    """Draws a row per rank, scaled by time: what a rank does at each moment, and ``·`` where it waits.

    Letters are F, I, W and B; capitals for even microbatches, small ones for odd, so that one can be told from the
    next. Where a rank holds several stages, all but its first are underlined (with colours only).

    Args:
        timeline: The step.
        width: Characters in a line, at most.
        colors: Whether to colour the letters by ANSI escape sequences.
    """
    placement = timeline.schedule.placement
    labels = [_label(placement, rank) for rank in range(placement.num_ranks)]
    bubbles = [f"{timeline.bubble_fraction(rank):7.1%}" for rank in range(placement.num_ranks)]
    num_columns = max(_MIN_COLUMNS, width - max(map(len, labels)) - max(map(len, bubbles)) - 2)
    per_column = timeline.span_ms / num_columns
    indent = max(map(len, labels)) + 1
    lines = [_legend(timeline, per_column), " " * indent + " " * num_columns + " bubble"]
    for label, times, bubble in zip(labels, timeline.ranks, bubbles, strict=True):
        cells = _cells(times, num_columns, per_column)
        drawn = _colored(cells, placement) if colors else "".join(_letter(cell) for cell in cells)
        lines.append(f"{label:<{indent}}{drawn}{bubble}")
    return "\n".join(lines)


def _label(placement: Placement, rank: int) -> str:
    stages = placement.stages_of_rank(rank)
    return f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})"


def _legend(timeline: Timeline, per_column: float) -> str:
    names = ", ".join(f"{kind} {name}" for kind, name in timeline.kinds().items() if kind.is_compute)
    schedule = timeline.schedule
    return (
        f"{schedule.name}, {schedule.num_microbatches} microbatches, one step of {timeline.span_ms:.1f} "
        f"{timeline.unit} ({_short(per_column)} {timeline.unit} a letter): {names}"
    )


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.2g}"


def _cells(times: tuple[ActionTimes, ...], num_columns: int, per_column: float) -> list[ActionTimes | None]:
    """What is going on at the middle of each column."""
    cells: list[ActionTimes | None] = []
    current = 0
    for column in range(num_columns):
        middle = (column + 0.5) * per_column
        while current < len(times) and times[current].end_ms <= middle:
            current += 1
        working = current < len(times) and times[current].start_ms <= middle
        cells.append(times[current] if working else None)
    return cells


def _letter(cell: ActionTimes | None) -> str:
    if cell is None:
        return _GAP
    letter = cell.action.kind.value
    return letter.lower() if _is_odd(cell) else letter


def _is_odd(cell: ActionTimes) -> bool:
    return (cell.action.microbatch or 0) % 2 == 1


def _colored(cells: list[ActionTimes | None], placement: Placement) -> str:
    """The letters with an escape sequence wherever the style changes."""
    styled = groupby(cells, key=lambda cell: _style(cell, placement))
    return "".join(f"\x1b[0m{style}{''.join(map(_letter, same))}" for style, same in styled) + "\x1b[0m"


def _style(cell: ActionTimes | None, placement: Placement) -> str:
    if cell is None:
        return "\x1b[2m"
    stage = cell.action.stage
    is_first = stage == placement.stages_of_rank(placement.rank_of_stage[stage])[0]
    background = _BACKGROUNDS[cell.action.kind][_is_odd(cell)]
    return f"\x1b[{'' if is_first else '4;'}38;5;255;48;5;{background}m"
