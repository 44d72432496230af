"""One clock for all ranks, and the pictures of a step."""

from __future__ import annotations

import json
import random
import re
from xml.etree import ElementTree

import pytest
from simulated_steps import schedule_and_costs, simulated_times

from lightning_pp.schedule import StageCosts, build_schedule
from lightning_pp.telemetry import Timeline, chrome_trace, html_timeline, text_timeline

SCHEDULES = ["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_1f1b"]
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def starts(timeline: Timeline) -> list[float]:
    return [moment.start_ms for times in timeline.ranks for moment in times]


def timeline_of(name: str) -> Timeline:
    schedule, costs = schedule_and_costs(name)
    return Timeline.aligned(schedule, simulated_times(schedule, costs))


@pytest.mark.parametrize("p2p", [0.0, 0.25])
@pytest.mark.parametrize("name", SCHEDULES)
def test_clocks_are_put_together_to_a_messages_latency(name: str, p2p: float) -> None:
    schedule, costs = schedule_and_costs(name, p2p)
    generator = random.Random(0)
    clocks = [generator.uniform(-1e6, 1e6) for _ in range(schedule.placement.num_ranks)]
    timeline = Timeline.aligned(schedule, simulated_times(schedule, costs, clocks))
    truth = [moment.start_ms for times in simulated_times(schedule, costs) for moment in times]
    away = p2p * (schedule.placement.num_ranks - 1)
    assert starts(timeline) == pytest.approx(truth, abs=away + 1e-6)
    assert min(starts(timeline)) == 0.0


def test_a_rank_that_starts_late_is_drawn_late() -> None:
    """Nobody waits for it in one direction, so only the other tells how late it is."""
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    first, last = simulated_times(schedule, StageCosts(1.0, 1.0, 1.0, p2p=0.0))
    late = 5.0
    waiting = [moment if moment.action.kind.value == "F" else _moved(moment, late) for moment in first]
    not_waiting = [type(moment)(moment.action, moment.start_ms, moment.start_ms, moment.end_ms) for moment in last]
    timeline = Timeline.aligned(schedule, [waiting, not_waiting])
    assert timeline.ranks[1][0].start_ms == pytest.approx(last[0].start_ms + late)


def _moved(moment: object, by: float) -> object:
    return type(moment)(moment.action, moment.asked_ms, moment.start_ms + by, moment.end_ms + by)  # type: ignore[attr-defined,call-arg]


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_shows_each_rank_to_scale(name: str) -> None:
    timeline = timeline_of(name)
    text = text_timeline(timeline, width=240, colors=False)
    header, _, *rows = text.splitlines()
    assert f"{timeline.span_ms:.1f} ms" in header
    assert len(rows) == timeline.schedule.placement.num_ranks
    assert max(map(len, rows)) <= 240
    for rank, row in enumerate(rows):
        label, drawing, bubble = re.fullmatch(r"(rank .*\)) +([FIWBfiwb·]+) +([0-9.]+)%", row).groups()  # type: ignore[union-attr]
        assert label.startswith(f"rank {rank} (stage")
        assert float(bubble) == pytest.approx(100 * timeline.bubble_fraction(rank), abs=0.051)
        times = timeline.ranks[rank]
        per_letter = timeline.span_ms / len(drawing)
        work = sum(moment.work_ms for moment in times)
        assert (len(drawing) - drawing.count("·")) * per_letter == pytest.approx(work, abs=len(times) * per_letter / 2)
        # runs of equal letters are actions, in the order of the program; neighbours of a kind differ in their case
        runs = [run[0] for run in re.findall(r"((.)\2*)", drawing.replace("·", ""))]
        letters = [
            m.action.kind.value.lower() if (m.action.microbatch or 0) % 2 else m.action.kind.value for m in times
        ]
        assert [run[0] for run in runs] == [
            letter for index, letter in enumerate(letters) if index == 0 or letters[index - 1] != letter
        ]


def test_colors_do_not_change_the_letters() -> None:
    timeline = timeline_of("zb_v")
    colored = text_timeline(timeline, width=80)
    assert ANSI.sub("", colored) == text_timeline(timeline, width=80, colors=False)
    assert colored.count("\x1b[4;") > 2  # the second stage of a rank is underlined
    assert all(line.endswith("%") and "\x1b[0m" in line for line in colored.splitlines()[2:])


def test_a_narrow_terminal_still_gets_a_picture() -> None:
    row = text_timeline(timeline_of("1f1b"), width=1, colors=False).splitlines()[2]
    assert re.search(r"\) [FfBb·]{10} +[0-9.]+%$", row)


def test_html_is_well_formed_and_to_scale() -> None:
    timeline = timeline_of("zb_h1")
    page = html_timeline(timeline)
    svg = ElementTree.fromstring(page[page.index("<svg") :])
    names = {"s": "http://www.w3.org/2000/svg"}
    rectangles = svg.findall("s:rect", names)
    moments = [moment for times in timeline.ranks for moment in times]
    assert len(rectangles) == len(moments)
    scale = 1000 / timeline.span_ms
    for rectangle, moment in zip(rectangles, moments, strict=True):
        assert float(rectangle.attrib["width"]) == pytest.approx(moment.work_ms * scale, abs=0.06)
        assert float(rectangle.attrib["x"]) == pytest.approx(60 + moment.start_ms * scale, abs=0.06)
        assert rectangle.findtext("s:title", namespaces=names, default="").startswith(f"{moment.action}: ")
    assert "<script" not in page


def test_html_of_a_large_step_is_small() -> None:
    schedule = build_schedule("zb_h1", num_ranks=16, num_microbatches=64)
    timeline = Timeline.aligned(schedule, simulated_times(schedule, StageCosts(1.0, 1.0, 1.0, p2p=0.1)))
    assert len(html_timeline(timeline)) < 600_000


def test_trace_events_are_the_actions_and_waits() -> None:
    timeline = timeline_of("1f1b")
    events = json.loads(chrome_trace(timeline))["traceEvents"]
    work = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    moments = [(rank, moment) for rank, times in enumerate(timeline.ranks) for moment in times]
    assert [(e["tid"], e["name"], e["args"]["stage"], e["args"]["microbatch"]) for e in work] == [
        (rank, str(m.action), m.action.stage, m.action.microbatch) for rank, m in moments
    ]
    assert [e["dur"] for e in work] == pytest.approx([1e3 * m.work_ms for _, m in moments], abs=1e-3)
    waits = sum(event["dur"] for event in events if event.get("cat") == "wait")
    assert waits == pytest.approx(1e3 * sum(m.wait_ms for _, m in moments), abs=1.0)
    assert sum(event["ph"] == "M" for event in events) == 5
