"""A step's timeline as SVG, about 150 bytes an action, without scripts."""

from __future__ import annotations

from html import escape

from lightning_pp.telemetry.timeline.drawing import BUBBLE_COLOR, COLORS, LINE_COLOR, ODD_OPACITY, Box, Label, draw
from lightning_pp.telemetry.timeline.step import Timeline


def svg_timeline(timeline: Timeline) -> str:
    """Draws a row per rank, scaled by time; grey is the bubble, and hovering over an action tells its times.

    Odd microbatches are lighter. Where a rank holds several stages, all but its first are lower.
    """
    drawing = draw(timeline)
    bubbles = "".join(
        f"M{left:.1f} {top}h{width:.1f}v{height}h-{width:.1f}z" for left, top, width, height in drawing.spans
    )
    ticks = "".join(f"M{left:.1f} {top:.0f}v{height:.0f}" for left, top, height in drawing.ticks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width} {drawing.height}" '
        f'font-family="sans-serif" font-size="12">',
        f"<title>{escape(drawing.title)}</title>",
        f"<style>{_style()}</style>",
        f'<path d="M0 0h{drawing.width}v{drawing.height}H0z" fill="#fff"/>',
        f'<path d="{bubbles}" fill="{BUBBLE_COLOR}"/>',
        f'<path d="{ticks}" stroke="{LINE_COLOR}"/>',
        *map(_swatch, drawing.legend),
        *map(_rectangle, drawing.boxes),
        *map(_text, drawing.labels),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _style() -> str:
    fills = "".join(f".{kind.value}{{fill:{color}}}" for kind, color in COLORS.items())
    return f".n{{fill:#fff;pointer-events:none}}.o{{opacity:{ODD_OPACITY}}}{fills}"


def _swatch(box: Box) -> str:
    corner = f"M{box.left:.1f} {box.top}"
    return f'<path class="{box.kind.value}" d="{corner}h{box.width}v{box.height}h-{box.width}z"/>'


def _rectangle(box: Box) -> str:
    style = box.kind.value + (" o" if box.is_odd else "")
    return (
        f'<rect class="{style}" x="{box.left:.1f}" y="{box.top}" width="{box.width:.1f}" height="{box.height}">'
        f"<title>{escape(box.about)}</title></rect>"
    )


def _text(label: Label) -> str:
    light = ' class="n"' if label.is_light else ""
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    return f'<text{light} x="{label.left:.1f}" y="{label.baseline:.0f}"{anchor}>{escape(label.text)}</text>'
