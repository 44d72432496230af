"""A step's timeline as a page with one SVG, about 100 bytes an action, without scripts."""

from __future__ import annotations

from html import escape

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import ActionKind
from lightning_pp.telemetry.timeline import Timeline

# the zero-bubble papers' colours: F blue, I cyan, W green
_COLORS = {ActionKind.F: "#3b6fb6", ActionKind.I: "#4fb3c4", ActionKind.W: "#5aa05f", ActionKind.B: "#7a63ad"}
_LABEL_WIDTH, _DRAWING_WIDTH, _BUBBLE_WIDTH = 60, 1000, 70
_ROW_HEIGHT, _ROW_PITCH, _HEADER_HEIGHT = 22, 28, 24
_LATER_STAGE_INDENT = 6
_LEAST_WIDTH_WITH_NUMBER = 16.0


def html_timeline(timeline: Timeline) -> str:
    """Draws a row per rank, scaled by time; gaps are bubbles, and hovering over an action tells its times.

    Odd microbatches are lighter. Where a rank holds several stages, all but its first are lower.
    """
    width = _LABEL_WIDTH + _DRAWING_WIDTH + _BUBBLE_WIDTH
    height = _HEADER_HEIGHT + _ROW_PITCH * len(timeline.ranks)
    scale = _DRAWING_WIDTH / timeline.span_ms if timeline.span_ms else 0.0
    schedule = timeline.schedule
    title = f"{schedule.name}, {schedule.num_microbatches} microbatches: one step of {timeline.span_ms:.1f} ms"
    parts = [
        f"<title>{escape(title)}</title>",
        f"<style>{_style()}</style>",
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f'<text x="{_LABEL_WIDTH}" y="15">{escape(title)}</text>',
        _legend(timeline, width),
    ]
    for rank, times in enumerate(timeline.ranks):
        top = _HEADER_HEIGHT + rank * _ROW_PITCH
        middle = top + _ROW_HEIGHT // 2 + 4
        parts.append(f'<text x="0" y="{middle}">rank {rank}</text>')
        bubble = f"{timeline.bubble_fraction(rank):.1%}"
        parts.append(f'<text x="{width}" y="{middle}" text-anchor="end">{bubble} bubble</text>')
        first_stage = schedule.placement.stages_of_rank(rank)[0]
        for moment in times:
            parts.append(_block(moment, top, scale, is_first_stage=moment.action.stage == first_stage))
    return "\n".join([*parts, "</svg>"])


def _style() -> str:
    fills = "".join(f".{kind.value}{{fill:{color}}}" for kind, color in _COLORS.items())
    text = "text{font:12px sans-serif}.n{fill:#fff;pointer-events:none}"
    return f"body{{background:#fff}}{text}.o{{opacity:.75}}{fills}"


def _legend(timeline: Timeline, right: int) -> str:
    words = [f'<tspan class="{kind.value}">■</tspan> {kind.value} {name}' for kind, name in timeline.kinds().items()]
    return f'<text x="{right}" y="15" text-anchor="end">{" ".join(words)}</text>'


def _block(moment: ActionTimes, top: int, scale: float, *, is_first_stage: bool) -> str:
    left, width = _LABEL_WIDTH + moment.start_ms * scale, max(moment.work_ms * scale, 0.2)
    action = moment.action
    bottom = top + _ROW_HEIGHT
    top += 0 if is_first_stage else _LATER_STAGE_INDENT
    style = action.kind.value + (" o" if (action.microbatch or 0) % 2 else "")
    block = (
        f'<rect class="{style}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{bottom - top}">'
        f"<title>{action}: {moment.work_ms:.3g} ms, after {moment.wait_ms:.3g} ms of waiting</title></rect>"
    )
    if width < _LEAST_WIDTH_WITH_NUMBER:
        return block
    return block + (
        f'<text class="n" x="{left + width / 2:.1f}" y="{(top + bottom) // 2 + 4}" text-anchor="middle">'
        f"{action.microbatch}</text>"
    )
