"""From the times of actions to numbers per stage and pictures of a step. Knows the plan and torch, not Lightning."""

from __future__ import annotations

from lightning_pp.telemetry.timeline.html import html_timeline
from lightning_pp.telemetry.timeline.recorded import RecordedStep
from lightning_pp.telemetry.timeline.trace import chrome_trace

__all__ = ["RecordedStep", "chrome_trace", "html_timeline"]
