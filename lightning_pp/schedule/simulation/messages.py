"""Messages while a schedule runs: one order of all actions. The bytes that were sent and are not yet used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightning_pp.schedule.program.coded import B, F, I
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.execution import Times
from lightning_pp.schedule.simulation.simulate import simulate

if TYPE_CHECKING:
    from lightning_pp.schedule.schedule import Schedule


def turns_of_actions(schedule: Schedule) -> tuple[tuple[float, ...], ...]:
    """For each rank, when each of its actions begins. F, I and W take one unit of time, everything else none.

    An action begins after the one before it on its rank, and after those whose results it needs.

    Raises:
        ScheduleError: As :func:`simulate`.
    """
    return simulate(schedule, StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0)).start_ms


def posted_peaks(schedule: Schedule, values: Iterable[tuple[int, int, int, bool]]) -> tuple[int, ...]:
    """For each rank, the most bytes of messages that have been sent to it and that it has not used.

    A message counts from the begin of the action that sends it to the begin of the one that needs it, where F, I and W
    take one unit of time and messages none. Receives for them are posted by then, where they occupy the device.

    Args:
        schedule: Legal programs.
        values: What crosses in each microbatch: from which stage, to which, bytes, and whether a gradient comes back.
    """
    n, m = schedule.placement.num_stages, schedule.num_microbatches
    rank_of_stage = schedule.placement.rank_of_stage
    begin = np.full((2, n, m), np.inf)  # of F; of I or B
    for program, turns in zip(schedule.coded, turns_of_actions(schedule), strict=True):
        kinds, stages, microbatches = program.parts()
        for index, chosen in enumerate((kinds == F, (kinds == I) | (kinds == B))):
            begin[index, stages[chosen], microbatches[chosen]] = np.array(turns)[chosen]
    changes: list[list[tuple[Times, int]]] = [[] for _ in schedule.programs]
    for source, target, num_bytes, has_gradient in values:
        if rank_of_stage[source] == rank_of_stage[target]:
            continue
        changes[rank_of_stage[target]] += [(begin[0, source], num_bytes), (begin[0, target] + 0.5, -num_bytes)]
        if has_gradient and not schedule.forward_only:
            changes[rank_of_stage[source]] += [(begin[1, target], num_bytes), (begin[1, source] + 0.5, -num_bytes)]
    return tuple(map(_highest, changes))


def _highest(changes: Sequence[tuple[Times, int]]) -> int:
    """The highest sum of the changes up to any time; each is made at all its times."""
    if not changes:
        return 0
    times = np.concatenate([when for when, _ in changes])
    by = np.concatenate([np.full(len(when), change) for when, change in changes])
    return int(np.cumsum(by[np.argsort(times, kind="stable")]).max())
