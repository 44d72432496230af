"""Messages while a schedule runs: one order of all actions. The bytes that were sent and are not yet used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_pp.schedule.program.coded import B, F, I
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.execution import Times
from lightning_pp.schedule.simulation.simulate import simulate

if TYPE_CHECKING:
    from lightning_pp.schedule.schedule import Schedule


def action_turns(schedule: Schedule) -> tuple[tuple[float, ...], ...]:
    """For each rank, when each of its actions begins. F, I and W take one unit of time, everything else none.

    An action begins after the one before it on its rank, and after those whose results it needs.

    Raises:
        ScheduleError: As :func:`simulate`.
    """
    return simulate(schedule, StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0)).start_ms


class _Flow(NamedTuple):
    """Messages from one stage to another, one for each microbatch: when they are sent and used, by which actions."""

    sender: int
    receiver: int
    num_bytes: int
    used_bytes: int
    is_gradient: bool
    sent: Times
    used: Times
    sent_by: npt.NDArray[np.int64]
    used_by: npt.NDArray[np.int64]


def message_peaks(schedule: Schedule, values: Iterable[tuple[int, int, int, int, bool]]) -> tuple[int, ...]:
    """For each rank, the most bytes of messages that it holds: sent to it and not used, or sent by it and not released.

    F, I and W take one unit of time and messages none. A receive is posted when its message is sent, and occupies the
    device until the action that needs it begins. What a rank sends it releases at the first message that comes back
    from the receiver, of an action that needed what was sent or of a later one. Gradients may stay until such a message
    of the next step.

    Args:
        schedule: Legal programs.
        values: What crosses in each microbatch: source, target, bytes as sent and as used, whether a gradient returns.
    """
    changes: list[list[tuple[Times, int]]] = [[] for _ in schedule.programs]
    between: dict[tuple[int, int], list[_Flow]] = {}
    for flow in _flows(schedule, values):
        changes[flow.receiver] += [(flow.sent, flow.num_bytes), (flow.used, flow.used_bytes - flow.num_bytes)]
        changes[flow.receiver].append((flow.used + 0.5, -flow.used_bytes))
        between.setdefault((flow.sender, flow.receiver), []).append(flow)
    for (sender, receiver), there in between.items():
        back = between.get((receiver, sender), ())
        kept = 0  # of the step before
        for flow, when in zip(there, _released(there, back), strict=True):
            changes[sender] += [(flow.sent + 0.75, flow.num_bytes), (when + 0.5, -flow.num_bytes)]
            kept += flow.num_bytes * int(flow.is_gradient and np.isinf(when).sum())
        first = min((float(flow.used.min()) for flow in back), default=np.inf)
        changes[sender] += [(np.array([-1.0]), kept), (np.array([first + 0.5]), -kept)]
    return tuple(map(_highest, changes))


def _flows(schedule: Schedule, values: Iterable[tuple[int, int, int, int, bool]]) -> list[_Flow]:
    n, m, rank_of_stage = schedule.placement.num_stages, schedule.num_microbatches, schedule.placement.rank_of_stage
    begin = np.full((2, n, m), np.inf)  # of F; of I or B
    order = np.zeros((2, n, m), np.int64)  # which action of its rank it is
    for program, turns in zip(schedule.coded, action_turns(schedule), strict=True):
        kinds, stages, microbatches = program.parts()
        for index, chosen in enumerate((kinds == F, (kinds == I) | (kinds == B))):
            begin[index, stages[chosen], microbatches[chosen]] = np.array(turns)[chosen]
            order[index, stages[chosen], microbatches[chosen]] = np.flatnonzero(chosen)
    found = []
    for source, target, num_bytes, used_bytes, has_gradient in values:
        for kind in (0, 1) if has_gradient and not schedule.forward_only else (0,):
            start, end = (target, source) if kind else (source, target)
            times = (begin[kind, start], begin[kind, end], order[kind, start], order[kind, end])
            found.append(_Flow(rank_of_stage[start], rank_of_stage[end], num_bytes, used_bytes, bool(kind), *times))
    return [flow for flow in found if flow.sender != flow.receiver]


def _released(there: Sequence[_Flow], back: Sequence[_Flow]) -> list[Times]:
    """When the sender releases each message of ``there``: never, unless one of ``back`` comes in this step."""
    never = np.array([np.inf])
    by = np.concatenate([flow.sent_by for flow in back]) if back else np.zeros(0, np.int64)
    first = np.argsort(by)
    used = np.concatenate([flow.used for flow in back])[first] if back else np.zeros(0)
    earliest = np.concatenate([np.minimum.accumulate(used[::-1])[::-1], never])  # of all from a place on
    released = np.concatenate([earliest[np.searchsorted(by[first], flow.used_by)] for flow in there])
    in_order = np.argsort(np.concatenate([flow.sent for flow in there]), kind="stable")
    released[in_order] = np.maximum.accumulate(released[in_order])
    return np.split(released, len(there))


def _highest(changes: Sequence[tuple[Times, int]]) -> int:
    """The highest sum of the changes up to any time; each is made at all its times."""
    if not changes:
        return 0
    times = np.concatenate([when for when, _ in changes])
    by = np.concatenate([np.full(len(when), change) for when, change in changes])
    return int(np.cumsum(by[np.argsort(times, kind="stable")]).max())
