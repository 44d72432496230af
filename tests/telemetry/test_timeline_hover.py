"""What the timeline's page tells of the action under the pointer, its own script being run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_steps import schedule_and_costs, simulated_times
from timeline_browsers import Point, point_in_chromium, point_in_v8

from lightning_pp.telemetry import RecordedStep, html_timeline
from lightning_pp.telemetry.timeline.step import Timeline

PLANNED, MEASURED = 0, 1


def number(text: str) -> float:
    """Of "2.5 ms for 0F3 ...": the milliseconds."""
    amount, unit, *_ = text.split(" ")
    assert unit.rstrip(",") == "ms"
    return float(amount)


@pytest.mark.parametrize(
    "point_at", [point_in_v8, pytest.param(point_in_chromium, marks=pytest.mark.browser)], ids=["v8", "chromium"]
)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
def test_hovering_tells_the_action_and_what_it_waited_for(
    name: str, point_at: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    schedule, costs = schedule_and_costs(name)
    step = RecordedStep.of(7, Timeline.aligned(schedule, simulated_times(schedule, costs)))
    timeline = step.measured
    longest = max(step.planned.span_ms, timeline.span_ms)
    moments = [(rank, moment) for rank, times in enumerate(timeline.ranks) for moment in times]
    points: list[Point] = [(MEASURED, rank, (one.start_ms + one.end_ms) / 2 / longest) for rank, one in moments]
    waits = [(rank, one) for rank, one in moments if one.wait_ms > 0.5]
    assert waits
    points += [(MEASURED, rank, (one.start_ms - one.wait_ms / 2) / longest) for rank, one in waits]
    found = point_at(html_timeline(step), points, tmp_path)
    assert found["asked"] == [] and found["refused"] == []
    for (rank, one), shown in zip(moments, found["shown"], strict=False):
        rows = dict(shown["rows"])
        assert shown["title"].split(":")[0] == str(one.action)
        assert rows["stage"] == f"{one.action.stage} on rank {rank}"
        assert rows["microbatch"] == str(one.action.microbatch)
        assert number(rows["took"]) == pytest.approx(one.work_ms, abs=2e-3)
        neighbour = _needed(str(one.action), schedule.placement.num_stages)
        if neighbour is not None and one.wait_ms > 0.5:
            assert number(rows["waited"]) == pytest.approx(one.wait_ms, abs=2e-3)
            assert any(f" for {name} of rank " in rows["waited"] for name in neighbour)
    for (rank, one), shown in zip(waits, found["shown"][len(moments) :], strict=True):
        assert shown["title"] == f"waiting, then {one.action}"
        assert dict(shown["rows"])["rank"] == str(rank)
    assert found["outside"] is None
    assert found["zoomed"]["title"] == found["shown"][0]["title"]
    # sixteen turns of the wheel show a fiftieth of the span, of which a quarter is less than the rest of the action
    assert found["beside"]["title"] == found["shown"][0]["title"]


def _needed(action: str, num_stages: int) -> list[str] | None:
    """Names of what an action of one letter and one digit each needs of the stages beside it."""
    stage, kind, microbatch = int(action[0]), action[1], action[2:]
    if kind == "F" and stage > 0:
        return [f"{stage - 1}F{microbatch}"]
    if kind in "IB" and stage + 1 < num_stages:
        return [f"{stage + 1}I{microbatch}", f"{stage + 1}B{microbatch}"]
    return None
