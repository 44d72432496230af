"""The inner loop of the simulator, on integers, fast enough to be called thousands of times by the search.

Codes and rows are those of :mod:`lightning_pp.schedule.program.coded`. Sharding actions, which have no microbatch, are
the negative codes ``-1 - (k * num_stages + s)`` with UNSHARD 0, RESHARD 1, REDUCE 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeGuard

from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.coded import INDEX_OF_KIND, CodedProgram, Codes
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.program.program import Programs
from lightning_pp.schedule.simulation.costs import ResolvedCosts, StageCosts

_SHARDING_INDEX = {ActionKind.UNSHARD: 0, ActionKind.RESHARD: 1, ActionKind.REDUCE: 2}
WHOLE_BATCH = -2
"""In the place of a row: all forwards of the last stage, which its backwards need under ``whole_batch_loss``."""


@dataclass(frozen=True)
class CostTables:
    """What the inner loop looks up, by row.

    Attributes:
        duration: Milliseconds of the action.
        needs: Row whose result the action waits for (B publishes its result in the row of I), -1 for none,
            ``WHOLE_BATCH`` for all forwards of the last stage.
        latency: Milliseconds from the end of the needed action to its arrival.
        publishes: Row in which the action's end is noted.
        gather: Milliseconds of UNSHARD, by stage.
        reduce: Milliseconds of REDUCE, by stage.
    """

    duration: tuple[float, ...]
    needs: tuple[int, ...]
    latency: tuple[float, ...]
    publishes: tuple[int, ...]
    gather: tuple[float, ...]
    reduce: tuple[float, ...]

    @classmethod
    def build(
        cls, placement: Placement, costs: StageCosts | ResolvedCosts, *, whole_batch_loss: bool = False
    ) -> CostTables:
        """Tables for one placement; raises ScheduleError if the costs are for another number of stages."""
        num_stages, rank_of_stage = placement.num_stages, placement.rank_of_stage
        resolved = costs.per_stage(num_stages) if isinstance(costs, StageCosts) else costs
        stages = range(num_stages)
        full = tuple(map(sum, zip(resolved.backward_input, resolved.backward_weight, strict=True)))
        need_forward = tuple(stage - 1 for stage in stages)
        of_last = WHOLE_BATCH if whole_batch_loss else -1
        need_backward = tuple(num_stages + stage + 1 if stage + 1 < num_stages else of_last for stage in stages)

        def arrival(stage: int, sender: int, p2p: tuple[float, ...]) -> float:
            outside = not 0 <= sender < num_stages
            return 0.0 if outside or rank_of_stage[stage] == rank_of_stage[sender] else p2p[sender]

        from_previous = tuple(arrival(stage, stage - 1, resolved.p2p) for stage in stages)
        from_next = tuple(arrival(stage, stage + 1, resolved.p2p_back) for stage in stages)
        rows = tuple(range(4 * num_stages))
        return cls(
            duration=resolved.forward + resolved.backward_input + resolved.backward_weight + full,
            needs=need_forward + need_backward + (-1,) * num_stages + need_backward,
            latency=from_previous + from_next + (0.0,) * num_stages + from_next,
            publishes=rows[: 3 * num_stages] + rows[num_stages : 2 * num_stages],
            gather=resolved.gather,
            reduce=resolved.reduce,
        )


@dataclass(frozen=True)
class Run:
    """Times of one execution; a rank that waits for ever has fewer of them than actions.

    Attributes:
        start: For each rank and action, when it starts.
        end: For each rank and action, when it ends.
        ended: For each rank, when all has ended that it does, reductions included.
    """

    start: list[list[float]]
    end: list[list[float]]
    ended: list[float]

    @property
    def makespan(self) -> float:
        """When everything has ended."""
        return max(self.ended)


def encode(schedule: Programs) -> list[list[int]]:
    """The programs of ``schedule`` as codes."""
    num_stages, m = schedule.placement.num_stages, schedule.num_microbatches
    return [
        program.codes.tolist()
        if _is_coded_for(program, schedule)
        else [
            (INDEX_OF_KIND[action.kind] * num_stages + action.stage) * m + action.microbatch
            if action.microbatch is not None and action.kind in INDEX_OF_KIND
            else -1 - (_SHARDING_INDEX[action.kind] * num_stages + action.stage)
            for action in program
        ]
        for program in schedule.programs
    ]


def codes_of(schedule: Programs) -> list[Codes] | None:
    """The codes of all programs; None where a program is not given as codes."""
    programs = [program for program in schedule.programs if _is_coded_for(program, schedule)]
    return [program.codes for program in programs] if len(programs) == len(schedule.programs) else None


def _is_coded_for(program: Sequence[Action], schedule: Programs) -> TypeGuard[CodedProgram]:
    """Whether ``program`` has the codes of a schedule of these sizes."""
    if not isinstance(program, CodedProgram):
        return False
    sizes = (program.num_stages, program.num_microbatches)
    return sizes == (schedule.placement.num_stages, schedule.num_microbatches)


def execute(
    codes: Sequence[Sequence[int]],
    tables: CostTables,
    placement: Placement,
    m: int,
    begin_ms: Sequence[float] | None = None,
) -> Run:
    """Run all programs as far as they go.

    Each rank begins at its ``begin_ms``, at 0 by default.

    A program without UNSHARD gathers each stage once, from where its rank begins in the order of first use; a program
    without REDUCE reduces each stage once, after its last W or B.
    """
    num_ranks, num_stages = placement.num_ranks, placement.num_stages
    duration, needs, latency, publishes = tables.duration, tables.needs, tables.latency, tables.publishes
    clock = [0.0] * num_ranks if begin_ms is None else list(begin_ms)
    gathered = _implicit_gathers(codes, tables, clock, m)
    last_forward = _last_forward(codes, placement, m) if WHOLE_BATCH in needs else -1
    start: list[list[float]] = [[] for _ in range(num_ranks)]
    end: list[list[float]] = [[] for _ in range(num_ranks)]
    done = [-1.0] * (3 * num_stages * m)
    waiting = [-1] * (2 * num_stages * m)
    side = [
        max((gathered[stage] for stage in placement.stages_of_rank(rank)), default=0.0) for rank in range(num_ranks)
    ]
    ready = list(range(num_ranks))[::-1]
    while ready:
        rank = ready.pop()
        program, starts, ends, now = codes[rank], start[rank], end[rank], clock[rank]
        for index in range(len(starts), len(program)):
            code = program[index]
            if code < 0:
                begin, finish = _shard(code, max(now, side[rank]), now, gathered, tables)
                side[rank] = max(side[rank], finish)
                starts.append(begin)
                ends.append(finish)
                continue
            row, microbatch = divmod(code, m)
            needed = needs[row]
            if needed != -1:
                needed = needed * m + microbatch if needed >= 0 else last_forward
                arrived = done[needed]
                if arrived < 0.0:
                    waiting[needed] = rank
                    break
                arrived += latency[row]
                if arrived > now:
                    now = arrived
            available = gathered[row % num_stages]
            if available > now:
                now = available
            starts.append(now)
            now += duration[row]
            ends.append(now)
            published = publishes[row] * m + microbatch
            done[published] = now
            if published < len(waiting) and waiting[published] >= 0:
                ready.append(waiting[published])
                waiting[published] = -1
        clock[rank] = now
    ended = [max(ends, default=begin) for ends, begin in zip(end, clock, strict=True)]
    return Run(start, end, list(map(max, ended, _implicit_reductions(codes, end, tables, m))))


def _shard(code: int, free: float, now: float, gathered: list[float], tables: CostTables) -> tuple[float, float]:
    """Start and end of a sharding action, and its mark in ``gathered``.

    Args:
        code: The action.
        free: When the collectives before it have ended and the rank has come to it.
        now: When the rank has come to it.
        gathered: For each stage, when its parameters are there.
        tables: Costs.
    """
    kind, stage = divmod(-1 - code, len(gathered))
    if kind == _SHARDING_INDEX[ActionKind.RESHARD]:
        return now, now
    if kind == _SHARDING_INDEX[ActionKind.REDUCE]:
        return free, free + tables.reduce[stage]
    gathered[stage] = free + tables.gather[stage]
    return free, gathered[stage]


def _last_forward(codes: Sequence[Sequence[int]], placement: Placement, m: int) -> int:
    """The code of the last forward of the last stage, in the order of its rank."""
    row = placement.num_stages - 1
    return next(code for code in reversed(codes[placement.rank_of_stage[row]]) if code >= 0 and code // m == row)


def _implicit_gathers(
    codes: Sequence[Sequence[int]], tables: CostTables, begin_ms: Sequence[float], m: int
) -> list[float]:
    """When each stage's parameters are there, for programs that do not say when to gather."""
    num_stages = len(tables.gather)
    gathered = [0.0] * num_stages
    if not any(tables.gather):
        return gathered
    for program, begin in zip(codes, begin_ms, strict=True):
        if any(code < 0 and -1 - code < num_stages for code in program):
            continue
        stages = dict.fromkeys(code // m % num_stages for code in program if code >= 0)
        for stage, at in gather_ends(stages, tables, begin).items():
            gathered[stage] = at
    return gathered


def gather_ends(stages: Iterable[int], tables: CostTables, begin: float = 0.0) -> dict[int, float]:
    """When each of a rank's ``stages`` is there, gathered one after the other from ``begin``."""
    order = list(stages)
    ends = accumulate((tables.gather[stage] for stage in order), initial=begin)
    return dict(zip(order, list(ends)[1:], strict=True))


def _implicit_reductions(
    codes: Sequence[Sequence[int]], end: list[list[float]], tables: CostTables, m: int
) -> list[float]:
    """For each rank, when its last reduction ends, for programs that do not say when to reduce; 0 for none."""
    num_stages = len(tables.reduce)
    found = [0.0] * len(codes)
    if not any(tables.reduce):
        return found
    for rank, (program, ends) in enumerate(zip(codes, end, strict=True)):
        if any(code < 0 and -1 - code >= 2 * num_stages for code in program):
            continue
        last = {
            code // m % num_stages: time
            for code, time in zip(program, ends, strict=False)
            if code // m >= 2 * num_stages
        }
        found[rank] = reduction_end(last, tables)
    return found


def reduction_end(last: Mapping[int, float], tables: CostTables) -> float:
    """When a rank's last reduction ends, if those of its stages run one after the other.

    Args:
        last: For each stage, when its last backward ends.
        tables: Costs.
    """
    now = 0.0
    for stage, time in sorted(last.items(), key=lambda item: item[1]):
        now = max(now, time) + tables.reduce[stage]
    return now
