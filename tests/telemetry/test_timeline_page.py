"""The page and the trace of a step, read back and compared with the step."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from page_reading import data_of, view_of
from pool import WorkerPool
from simulated_steps import schedule_and_costs, simulated_times
from virtual_time import run_in_virtual_time

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import Schedule, Sharding, StageCosts, build_schedule, insert_sharding
from lightning_pp.telemetry import RecordedStep, chrome_trace, html_timeline
from lightning_pp.telemetry.timeline.recorded import measured_costs
from lightning_pp.telemetry.timeline.step import Timeline

SCHEDULES = ["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_1f1b"]
CLOCKS = [0.0, 1234.5, -777.0, 5e5]


def recorded(name: str, step: int = 7, p2p: float = 0.0) -> RecordedStep:
    schedule, costs = schedule_and_costs(name, p2p)
    clocks = CLOCKS[: schedule.placement.num_ranks]
    return RecordedStep.of(step, Timeline.aligned(schedule, simulated_times(schedule, costs, clocks)))


class Outside(HTMLParser):
    """Everything in a page that a browser would ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(name, value) for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_page_has_every_action_once_with_its_times(name: str) -> None:
    step = recorded(name)
    data = data_of(html_timeline(step))
    assert (data["unit"], data["step"]) == ("ms", 7)
    for view, timeline in (("planned", step.planned), ("measured", step.measured)):
        ranks = view_of(data, view)
        assert Counter(action for rank in ranks for action, _ in rank) == Counter(
            str(action) for program in timeline.schedule.programs for action in program
        )
        for row, times in zip(ranks, timeline.ranks, strict=True):
            for (action, moments), moment in zip(row, times, strict=True):
                assert action == str(moment.action)
                expected = (moment.asked_ms, moment.asked_ms + moment.early_ms, moment.start_ms, moment.end_ms)
                assert moments == pytest.approx(expected, abs=0.51 * data["tick"])
        (found,) = [one for one in data["views"] if one["name"] == view]
        bubbles = [timeline.bubble_fraction(rank) for rank in range(len(ranks))]
        assert found["bubbles"] == pytest.approx(bubbles, abs=1e-4)
    assert data["tick"] * 1e5 <= step.measured.span_ms  # a step is 100,000 ticks at least


def test_the_page_asks_for_nothing() -> None:
    page = html_timeline(recorded("zb_v"))
    parser = Outside()
    parser.feed(page)
    assert parser.found == [("href", "data:,")]  # in place of the icon that browsers ask for by themselves
    assert "default-src 'none'" in page
    script, style = (
        (files("lightning_pp.telemetry.timeline") / "page" / f"page.{kind}").read_text() for kind in ("js", "css")
    )
    assert script in page and style in page
    assert not re.findall(r"https?:|//\w+\.|\bfetch\b|XMLHttpRequest|import\s*\(|@import|url\(", page)


def test_one_timeline_is_a_page_too_in_its_own_unit() -> None:
    schedule, costs = schedule_and_costs("zb_h1")
    data = data_of(html_timeline(Timeline.simulated(schedule, costs, unit="GFLOP")))
    assert data["unit"] == "GFLOP"
    assert [view["name"] for view in data["views"]] == [""]
    row = view_of(data, "")[0]
    assert [end - start for _, (_, _, start, end) in row][:3] == pytest.approx([2.0, 2.0, 2.0], abs=1e-4)


def test_gathers_and_reductions_are_in_the_page() -> None:
    schedule = build_schedule("zb_v", num_ranks=2, num_microbatches=4)
    sharding = Sharding("full_shard", tuple((f"{stage}",) for stage in range(4)), dict.fromkeys("0123", 1), 1)
    sharded = insert_sharding(schedule, sharding)
    timeline = Timeline.simulated(sharded, StageCosts(2.0, 2.0, 2.0, gather=1.0, reduce=3.0))
    data = data_of(html_timeline(timeline))
    assert data["program"]["rank_of_stage"] == [0, 1, 1, 0]
    for rank, times in enumerate(timeline.sharding):
        assert data["program"]["sharding"][rank].split(" ") == [str(moment.action) for moment in times]
        row = data["views"][0]["sharding"][rank]
        assert [at * data["tick"] for at in row[::2]] == pytest.approx([m.start_ms for m in times], abs=1e-3)
        assert [took * data["tick"] for took in row[1::2]] == pytest.approx([m.work_ms for m in times], abs=1e-3)


def test_names_cannot_leave_their_place_in_the_page() -> None:
    schedule, costs = schedule_and_costs("1f1b")
    wicked = replace(schedule, name="</script><img src=x>")
    page = html_timeline(Timeline.simulated(wicked, costs))
    parser = Outside()
    parser.feed(page)
    assert [name for name, _ in parser.found] == ["href"]
    assert data_of(page)["program"]["name"] == "</script><img src=x>"


def test_a_step_of_64_ranks_and_256_microbatches_is_below_2_mb() -> None:
    schedule = build_schedule("zb_h1", num_ranks=64, num_microbatches=256)
    times = simulated_times(schedule, StageCosts(11.3, 10.7, 9.1, p2p=0.13))
    step = RecordedStep.of(1, Timeline.aligned(schedule, times))
    assert len(html_timeline(step)) < 2_000_000


# ---------------------------------------------------------------- the plan beside it


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_plan_of_an_undisturbed_step_is_the_step(name: str) -> None:
    step = recorded(name)
    for planned, measured in zip(step.planned.ranks, step.measured.ranks, strict=True):
        assert [moment.start_ms for moment in planned] == pytest.approx([moment.start_ms for moment in measured])
        assert [moment.work_ms for moment in planned] == pytest.approx([moment.work_ms for moment in measured])


def test_one_slow_action_is_not_in_the_plan() -> None:
    schedule, costs = schedule_and_costs("1f1b")
    rows = simulated_times(schedule, costs)
    slow = rows[0][-1]
    rows[0][-1] = ActionTimes(slow.action, slow.asked_ms, slow.start_ms, slow.end_ms + 40.0)
    step = RecordedStep.of(0, Timeline.aligned(schedule, rows))
    usual = schedule.simulate(costs).makespan
    assert step.planned.span_ms == pytest.approx(usual, abs=1.0)
    assert step.measured.ranks[0][-1].end_ms == pytest.approx(step.planned.ranks[0][-1].end_ms + 40.0, abs=1.0)


def test_costs_are_medians_and_messages_what_waiting_ranks_waited() -> None:
    schedule, costs = schedule_and_costs("zb_h1", p2p=0.0)
    found = measured_costs(Timeline.aligned(schedule, simulated_times(schedule, costs)))
    assert found.forward == pytest.approx(costs.forward)
    assert found.p2p == pytest.approx([0.0] * 4)
    # ranks 0 of zb_h1 have B alone, which costs both
    assert found.backward_input[0] == pytest.approx(2.5)  # type: ignore[index]
    assert found.backward_weight[1:] == pytest.approx(costs.backward_weight[1:])  # type: ignore[index]
    # a message takes 0.5 ms there, and nothing back: two clocks cannot tell that from 0.25 ms both ways
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=4)
    times = simulated_times(schedule, StageCosts(1.0, 1.0, 1.0, p2p=[0.5, 0.0]))
    sums = sum(measured_costs(Timeline.aligned(schedule, times)).p2p)  # type: ignore[arg-type]
    assert sums == pytest.approx(0.5, abs=1e-6)


def test_steps_that_real_processes_ran_in_virtual_time_are_shown_as_simulated(pool: WorkerPool) -> None:
    cases = [
        (build_schedule("zb_h1", num_ranks=4, num_microbatches=6), StageCosts([3.0, 4.0, 3.5, 2.5], 2.0, 1.5)),
        (build_schedule("zb_v", num_ranks=2, num_microbatches=5), StageCosts([2.0, 3.0, 2.5, 1.5], 2.25, 1.75)),
    ]
    by_rank = pool.run(run_in_virtual_time, cases, world_size=4, process_group=True, timeout=120.0)
    for index, (schedule, costs) in enumerate(cases):
        num_ranks = schedule.placement.num_ranks
        rows = [_timed(by_rank[rank][index], schedule, rank, ahead=CLOCKS[rank]) for rank in range(num_ranks)]
        page = html_timeline(RecordedStep.of(index, Timeline.aligned(schedule, rows)))
        simulated = schedule.simulate(costs).timeline
        for view in ("measured", "planned"):
            for row, expected in zip(view_of(data_of(page), view), simulated, strict=True):
                assert [action for action, _ in row] == [str(timed.action) for timed in expected]
                for (action, (_, _, start, end)), timed in zip(row, expected, strict=True):
                    assert (start, end) == pytest.approx((timed.start_ms, timed.end_ms), abs=1e-3), (view, action)


def _timed(found: dict[str, tuple[float, float]], schedule: Schedule, rank: int, ahead: float) -> Sequence[ActionTimes]:
    """As a timer would have it, on a clock that is so much ahead."""
    times: list[ActionTimes] = []
    asked = ahead
    for action in schedule.programs[rank]:
        start, end = (moment + ahead for moment in found[str(action)])
        times.append(ActionTimes(action, asked, start, end))
        asked = end
    return times


# ---------------------------------------------------------------- the trace


def events_of(step: Timeline | RecordedStep) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(chrome_trace(step))["traceEvents"]
    return events


def test_measured_and_planned_are_processes_of_the_trace() -> None:
    step = recorded("1f1b", 3)
    events = events_of(step)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "measured, 1f1b", 2: "planned, 1f1b"}
    begins = min(event["ts"] for event in events if event["ph"] == "X")
    assert begins == 0.0  # ranks that wait from the beginning do so at no time before it
    for process, timeline in ((1, step.measured), (2, step.planned)):
        work = [e for e in events if e["ph"] == "X" and e["pid"] == process and e["cat"] != "wait"]
        moments = [(rank, moment) for rank, times in enumerate(timeline.ranks) for moment in times]
        assert [(e["tid"], e["name"]) for e in work] == [(rank, str(moment.action)) for rank, moment in moments]
        at = work[0]["ts"] - 1e3 * moments[0][1].start_ms
        assert [e["ts"] - at for e in work] == pytest.approx([1e3 * m.start_ms for _, m in moments], abs=2e-3)
        assert [e["dur"] for e in work] == pytest.approx([1e3 * m.work_ms for _, m in moments], abs=2e-3)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_arrows_go_from_the_sender_to_who_needs_the_message(name: str) -> None:
    timeline = recorded(name).measured
    events = events_of(timeline)
    spans = {
        e["name"]: (e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["cat"] != "wait"
    }
    arrows: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    for arrow in arrows.values():
        sender, receiver = arrow["s"]["name"].split(" to ")
        for end, action in (("s", sender), ("f", receiver)):
            rank, begin, finish = spans[action]
            assert arrow[end]["tid"] == rank
            assert begin <= arrow[end]["ts"] <= finish
        assert arrow["f"]["bp"] == "e"
        assert arrow["s"]["tid"] != arrow["f"]["tid"]
    # every forward goes over each boundary between ranks once, and a backward comes back
    ranks = timeline.schedule.placement.rank_of_stage
    boundaries = sum(ranks[stage] != ranks[stage + 1] for stage in range(len(ranks) - 1))
    assert len(arrows) == 2 * boundaries * timeline.schedule.num_microbatches
