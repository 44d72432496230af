"""The simulator for pipelines of hundreds of ranks: all ranks take a step at the same time, on arrays.

Gives the numbers of :func:`lightning_pp.schedule.simulation.engine.execute`, bit for bit, for programs without sharding
actions, whose stages are gathered from the start of the step and reduced after their last backward. One turn looks at
the next action of every rank and runs those whose input is there; there are about as many turns as a rank has actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_pp.schedule.program.coded import Codes, F, W
from lightning_pp.schedule.program.program import Programs
from lightning_pp.schedule.simulation.engine import (
    WHOLE_BATCH,
    CostTables,
    codes_of,
    encode,
    execute,
    gather_ends,
    reduction_end,
)

Times: TypeAlias = npt.NDArray[np.float64]

_FEWEST_RANKS = 128
"""A turn takes as long for few ranks as for many; with fewer than these one action after the other is faster."""


@dataclass(frozen=True)
class Outcome:
    """Times of one execution, milliseconds; a rank that waits for ever has fewer of them than actions.

    Attributes:
        start: For each rank, the start of each action that ran.
        end: For each rank, their ends.
        ended: For each rank, when all has ended that it does, reductions included.
    """

    start: tuple[Times, ...]
    end: tuple[Times, ...]
    ended: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When everything has ended."""
        return max(self.ended)


def run_programs(schedule: Programs, tables: CostTables, begin_ms: Sequence[float] | None = None) -> Outcome:
    """Run all programs as far as they go, in the way that is fast for so many ranks.

    Each rank begins at its ``begin_ms``, at 0 by default.
    """
    placement, m = schedule.placement, schedule.num_microbatches
    if placement.num_ranks >= _FEWEST_RANKS:
        codes = codes_of(schedule)
        if codes is not None:
            return execute_wide(codes, tables, placement.rank_of_stage[-1], m, begin_ms)
    run = execute(encode(schedule), tables, placement, m, begin_ms)
    return Outcome(tuple(map(np.array, run.start)), tuple(map(np.array, run.end)), tuple(run.ended))


def execute_wide(
    codes: Sequence[Codes], tables: CostTables, last_rank: int, m: int, begin_ms: Sequence[float] | None = None
) -> Outcome:
    """Run ``codes``, which do not say when to gather and to reduce.

    Args:
        codes: For each rank, its actions.
        tables: Costs, by row.
        last_rank: The rank that holds the last stage.
        m: Number of microbatches of a step.
        begin_ms: For each rank, when it begins; None: at 0.
    """
    actions = Actions.build(codes, tables, last_rank, m)
    duration, latency = np.array(tables.duration), np.array(tables.latency)
    start, end = np.empty(len(actions.row)), np.empty(len(actions.row))
    done = np.full(actions.never + 1, -1.0)
    done[actions.always] = 0.0
    clock, at = np.array(begin_ms or [0.0] * len(codes)), actions.first.copy()
    gathered = np.tile(_gathered(codes, tables, clock, m), 4) if any(tables.gather) else None
    while True:
        arrived = done[actions.needed[at]]
        ranks = np.flatnonzero(arrived >= 0.0)
        if not len(ranks):
            break
        here = at[ranks]
        row = actions.row[here]
        begin = np.maximum(clock[ranks], arrived[ranks] + latency[row])
        if gathered is not None:
            begin = np.maximum(begin, gathered[row])
        finish = begin + duration[row]
        start[here], end[here] = begin, finish
        done[actions.published[here]] = finish
        clock[ranks] = finish
        at[ranks] = here + 1
    ran = [slice(first, last) for first, last in zip(actions.first.tolist(), at.tolist(), strict=True)]
    ends = tuple(end[part] for part in ran)
    ended = tuple(map(max, clock.tolist(), _last_reductions(codes, ends, tables, m)))
    return Outcome(tuple(start[part] for part in ran), ends, ended)


def _gathered(codes: Sequence[Codes], tables: CostTables, begin_ms: Times, m: int) -> Times:
    """For each stage, when its parameters are there."""
    gathered = np.zeros(len(tables.gather))
    for program, begin in zip(codes, begin_ms.tolist(), strict=True):
        stages, first = np.unique(program // m % len(tables.gather), return_index=True)
        for stage, at in gather_ends(stages[np.argsort(first)].tolist(), tables, begin).items():
            gathered[stage] = at
    return gathered


def _last_reductions(codes: Sequence[Codes], ends: Sequence[Times], tables: CostTables, m: int) -> list[float]:
    """For each rank, when its last reduction ends, 0 if there is none."""
    if not any(tables.reduce):
        return [0.0] * len(codes)
    found_ends, num_stages = [], len(tables.reduce)
    for program, times in zip(codes, ends, strict=True):
        rows = program[: len(times)] // m
        backwards = np.flatnonzero(rows >= W * num_stages)
        stages = rows[backwards] % num_stages
        found, first = np.unique(stages, return_index=True)
        last = backwards[len(stages) - 1 - np.unique(stages[::-1], return_index=True)[1]]
        order = np.argsort(first)
        ended = dict(zip(found[order].tolist(), times[last[order]].tolist(), strict=True))
        found_ends.append(reduction_end(ended, tables))
    return found_ends


@dataclass(frozen=True)
class Actions:
    """The actions of all ranks, one rank after the other, each with an action at its end that never runs.

    Attributes:
        first: For each rank, the place of its first action.
        row: For each action, its row.
        needed: For each action, the code whose end it waits for; ``always`` for none.
        published: For each action, the code under which its end is noted.
        always: Stands for a code that has ended from the start.
        never: Stands for a code that never ends.
    """

    first: npt.NDArray[np.int64]
    row: npt.NDArray[np.int32]
    needed: npt.NDArray[np.int64]
    published: npt.NDArray[np.int64]
    always: int
    never: int

    @classmethod
    def build(cls, codes: Sequence[Codes], tables: CostTables, last_rank: int, m: int) -> Actions:
        """Look up every action in ``tables``."""
        num_stages = len(tables.gather)
        always = 3 * num_stages * m
        needs, publishes = np.array(tables.needs), np.array(tables.publishes)
        ends = np.cumsum([len(program) + 1 for program in codes])
        first = np.concatenate(([0], ends[:-1]))
        row = np.zeros(ends[-1], dtype=np.int32)
        needed, published = np.full(ends[-1], always + 1), np.zeros(ends[-1], dtype=np.int64)
        of_last = codes[last_rank]
        last_forward = of_last[of_last // m == F * num_stages + num_stages - 1][-1:]
        for begin, program in zip(first.tolist(), codes, strict=True):
            here = slice(begin, begin + len(program))
            rows = program // m
            microbatch = program - rows * m
            of = needs[rows]
            row[here] = rows
            needed[here] = np.where(of >= 0, of * m + microbatch, always)
            if WHOLE_BATCH in tables.needs:
                needed[here][of == WHOLE_BATCH] = last_forward
            published[here] = publishes[rows] * m + microbatch
        return cls(first, row, needed, published, always, always + 1)
