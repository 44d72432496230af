"""A step's timeline as a page with one SVG, without scripts."""

from __future__ import annotations

from html import escape

from lightning_pp.telemetry.timeline.step import Timeline
from lightning_pp.telemetry.timeline.svg import svg_timeline


def html_timeline(timeline: Timeline) -> str:
    """The picture of :func:`~lightning_pp.telemetry.timeline.svg.svg_timeline` as a page of its own."""
    title = f"{timeline.schedule.name}, {timeline.schedule.num_microbatches} microbatches"
    return f"<title>{escape(title)}</title>\n<style>body{{background:#fff}}</style>\n{svg_timeline(timeline)}"
