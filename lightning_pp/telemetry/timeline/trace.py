"""A step for trace viewers (ui.perfetto.dev, chrome://tracing)."""

from __future__ import annotations

import json
from typing import Any

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.telemetry.timeline.recorded import RecordedStep
from lightning_pp.telemetry.timeline.step import Timeline, needs

_LEAST_WAIT_MS = 1e-3  # the resolution of the format's microseconds
_INSIDE_US = 0.001  # an arrow belongs to the action in which its end lies
_MEASURED_PROCESS, _PLANNED_PROCESS = 1, 2


def chrome_trace(step: Timeline | RecordedStep) -> str:
    """A step in Chrome's trace event format, JSON: a thread per rank, an event per action and per wait.

    Arrows go from each measured action to those of other ranks that need its message. Gathers and reductions, where
    there are any, have a thread of their own for each rank. Planned and measured ranks are processes of their own.

    Args:
        step: A step with its plan, or one timeline.
    """
    if isinstance(step, Timeline):
        views = [(_MEASURED_PROCESS, "pipeline", step)]
    else:
        views = [(_MEASURED_PROCESS, "measured", step.measured), (_PLANNED_PROCESS, "planned", step.planned)]
    # ranks that stood waiting when the step began do so before its first action
    begins_ms = max([0.0, *(-times[0].asked_ms for *_, timeline in views for times in timeline.ranks if times)])
    trace = _Trace()
    for process, name, timeline in views:
        trace.name_ranks(process, name, timeline)
        trace.add(process, timeline, begins_ms)
    return trace.text()


class _Trace:
    """Events; a place is a process and a thread."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._num_arrows = 0

    def text(self) -> str:
        return json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}, separators=(",", ":"))

    def name(self, process: int, what: str, name: str, thread: int) -> None:
        self._events.append({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}})

    def name_ranks(self, process: int, name: str, timeline: Timeline) -> None:
        self.name(process, "process_name", f"{name}, {timeline.schedule.name}", 0)
        for rank in range(len(timeline.ranks)):
            stages = ", ".join(map(str, timeline.schedule.placement.stages_of_rank(rank)))
            self.name(process, "thread_name", f"rank {rank}, stage {stages}", rank)
        for rank in range(len(timeline.sharding)):
            self.name(process, "thread_name", f"rank {rank}, gathers, reductions, copies", len(timeline.ranks) + rank)

    def event(
        self, name: str, category: str, place: tuple[int, int], start_ms: float, duration_ms: float, about: Any
    ) -> None:
        process, thread = place
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": process,
                "tid": thread,
                "ts": _us(start_ms),
                "dur": _us(duration_ms),
                "args": about,
            }
        )

    def add(self, process: int, timeline: Timeline, begins_ms: float) -> None:
        """All actions, waits, gathers and messages of a step."""
        for rank, times in enumerate(timeline.ranks):
            for moment in times:
                self._add_action((process, rank), moment, begins_ms)
        for rank, times in enumerate(timeline.sharding):
            for moment in times:
                action = moment.action
                place = process, len(timeline.ranks) + rank
                start_ms = begins_ms + moment.start_ms
                self.event(str(action), action.kind.value, place, start_ms, moment.work_ms, {"stage": action.stage})
        if process == _MEASURED_PROCESS:
            self._add_messages(process, timeline, begins_ms)

    def _add_action(self, place: tuple[int, int], moment: ActionTimes, begins_ms: float) -> None:
        action = moment.action
        about = {"stage": action.stage, "microbatch": action.microbatch}
        start_ms, work_ms = begins_ms + moment.start_ms, moment.end_ms - moment.start_ms
        asked_ms = begins_ms + moment.asked_ms
        if moment.wait_ms > _LEAST_WAIT_MS:
            if moment.early_ms > _LEAST_WAIT_MS:
                self.event(str(action), action.kind.value, place, asked_ms, moment.early_ms, about)
            self.event(f"wait for {action}", "wait", place, asked_ms + moment.early_ms, moment.wait_ms, {})
        else:
            start_ms, work_ms = start_ms - moment.early_ms, moment.work_ms
        self.event(str(action), action.kind.value, place, start_ms, work_ms, about)

    def _add_messages(self, process: int, timeline: Timeline, begins_ms: float) -> None:
        placement = timeline.schedule.placement
        time_of = {moment.action: moment for times in timeline.ranks for moment in times}
        for receiver, moment in time_of.items():
            for sender in needs(receiver, placement.num_stages):
                ranks = placement.rank_of_stage[sender.stage], placement.rank_of_stage[receiver.stage]
                if sender not in time_of or ranks[0] == ranks[1]:
                    continue
                self._num_arrows += 1
                about = {"name": f"{sender} to {receiver}", "cat": "message", "id": self._num_arrows, "pid": process}
                sent_us = _us(begins_ms + time_of[sender].end_ms) - _INSIDE_US
                arrived_us = _us(begins_ms + moment.start_ms) + _INSIDE_US
                self._events.append({**about, "ph": "s", "tid": ranks[0], "ts": round(sent_us, 3)})
                self._events.append({**about, "ph": "f", "bp": "e", "tid": ranks[1], "ts": round(arrived_us, 3)})


def _us(milliseconds: float) -> float:
    return round(milliseconds * 1e3, 3)
