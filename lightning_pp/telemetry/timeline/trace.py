"""A step's timeline for trace viewers (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
from typing import Any

from lightning_pp.telemetry.timeline.step import Timeline

_LEAST_WAIT_MS = 1e-3  # the resolution of the format's microseconds


def chrome_trace(timeline: Timeline) -> str:
    """The step in Chrome's trace event format, JSON: a thread per rank, an event per action and per wait.

    Gathers and reductions, where there are any, have a thread of their own for each rank.
    """
    placement = timeline.schedule.placement
    events: list[dict[str, Any]] = [_named("process_name", f"pipeline, {timeline.schedule.name}", 0)]
    for rank, times in enumerate(timeline.ranks):
        stages = ", ".join(map(str, placement.stages_of_rank(rank)))
        events.append(_named("thread_name", f"rank {rank}, stage {stages}", rank))
        for moment in times:
            action = moment.action
            about = {"stage": action.stage, "microbatch": action.microbatch}
            start_ms, work_ms = moment.start_ms, moment.end_ms - moment.start_ms
            if moment.wait_ms > _LEAST_WAIT_MS:
                if moment.early_ms > _LEAST_WAIT_MS:
                    events.append(_event(str(action), action.kind.value, rank, moment.asked_ms, moment.early_ms, about))
                wait_from_ms = moment.asked_ms + moment.early_ms
                events.append(_event(f"wait for {action}", "wait", rank, wait_from_ms, moment.wait_ms, {}))
            else:
                start_ms, work_ms = start_ms - moment.early_ms, moment.work_ms
            events.append(_event(str(action), action.kind.value, rank, start_ms, work_ms, about))
    for rank, times in enumerate(timeline.sharding):
        thread = len(timeline.ranks) + rank
        events.append(_named("thread_name", f"rank {rank}, gathers and reductions", thread))
        for moment in times:
            action = moment.action
            about = {"stage": action.stage}
            events.append(_event(str(action), action.kind.value, thread, moment.start_ms, moment.work_ms, about))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _named(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": thread, "args": {"name": name}}


def _event(
    name: str, category: str, rank: int, start_ms: float, duration_ms: float, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": 0,
        "tid": rank,
        "ts": round(start_ms * 1e3, 3),
        "dur": round(duration_ms * 1e3, 3),
        "args": about,
    }
