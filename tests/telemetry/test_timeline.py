"""One clock for all ranks, and the pictures of a step."""

from __future__ import annotations

import json
import random
import re

import pytest
from simulated_steps import schedule_and_costs, simulated_times

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import ActionKind, Sharding, StageCosts, build_schedule, insert_sharding
from lightning_pp.telemetry import chrome_trace
from lightning_pp.telemetry.timeline.step import Timeline
from lightning_pp.telemetry.timeline.text import text_timeline

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
    waiting = [
        moment if moment.action.kind.value == "F" else _moved(moment, late, is_asked_then=False) for moment in first
    ]
    not_waiting = [type(moment)(moment.action, moment.start_ms, moment.start_ms, moment.end_ms) for moment in last]
    timeline = Timeline.aligned(schedule, [waiting, not_waiting])
    assert timeline.ranks[1][0].start_ms == pytest.approx(last[0].start_ms + late)


def _moved(moment: ActionTimes, by: float, *, is_asked_then: bool = True) -> ActionTimes:
    asked_ms = moment.asked_ms + by * is_asked_then
    return ActionTimes(moment.action, asked_ms, moment.start_ms + by, moment.end_ms + by)


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


def test_a_simulated_timeline_is_what_a_timer_would_have_seen() -> None:
    schedule, costs = schedule_and_costs("zb_v")
    simulated = Timeline.simulated(schedule, costs)
    measured = Timeline.aligned(schedule, simulated_times(schedule, costs))
    assert starts(simulated) == pytest.approx(starts(measured), abs=0.3)  # a message's latency
    simulation = schedule.simulate(costs)
    assert simulated.span_ms == pytest.approx(simulation.makespan)
    bubbles = [simulated.bubble_fraction(rank) for rank in range(schedule.placement.num_ranks)]
    assert bubbles == pytest.approx(simulation.bubble_fraction.per_rank)


def test_gathers_and_reductions_go_on_below_the_actions() -> None:
    schedule = build_schedule("zb_v", num_ranks=2, num_microbatches=4)
    sharding = Sharding("full_shard", tuple((f"{stage}",) for stage in range(4)), dict.fromkeys("0123", 1), 1)
    sharded = insert_sharding(schedule, sharding)
    timeline = Timeline.simulated(sharded, StageCosts(2.0, 2.0, 2.0, gather=1.0, reduce=3.0))
    for program, actions, beside in zip(sharded.programs, timeline.ranks, timeline.sharding, strict=True):
        assert [moment.action for moment in beside] == [action for action in program if not action.kind.is_compute]
        assert min(moment.start_ms for moment in beside) >= 0.0
        gathers = [moment for moment in beside if moment.action.kind is ActionKind.UNSHARD]
        assert {moment.work_ms for moment in gathers} == {1.0}
        assert actions[0].start_ms >= gathers[0].end_ms  # nothing to compute with before
    ends = [moment.end_ms for times in timeline.sharding for moment in times]
    assert timeline.span_ms == max(ends) > max(times[-1].end_ms for times in timeline.ranks)
    num_drawn = sum(len(times) for times in timeline.sharding)
    events = json.loads(chrome_trace(timeline))["traceEvents"]
    assert sum(event["tid"] >= 2 and event["ph"] == "X" for event in events) == num_drawn
    assert "UNSHARD" not in text_timeline(timeline, colors=False)
    # measured times, each rank on a clock of its own, come together with what they belong to
    moved = [[_moved(moment, 7.0 * rank) for moment in times] for rank, times in enumerate(timeline.ranks)]
    beside = [[_moved(moment, 7.0 * rank) for moment in times] for rank, times in enumerate(timeline.sharding)]
    aligned = Timeline.aligned(sharded, moved, beside)
    for row, expected in zip(aligned.sharding, timeline.sharding, strict=True):
        assert [moment.start_ms for moment in row] == pytest.approx([moment.start_ms for moment in expected], abs=1e-6)
