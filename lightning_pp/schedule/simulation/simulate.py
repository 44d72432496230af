"""Run a schedule against costs, without a model: when each action starts, what waits, what is held.

Receives block and sends do not: a rank runs its actions in order, each as soon as the rank is free and what the action
needs has arrived. Gathers and reductions run one after the other beside the computation of their rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub

import numpy as np
import numpy.typing as npt

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.program.action import Action
from lightning_pp.schedule.program.coded import CodedProgram
from lightning_pp.schedule.program.program import Programs
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.engine import CostTables
from lightning_pp.schedule.simulation.memory import peaks_of
from lightning_pp.schedule.simulation.wide import Outcome, Times, run_programs

_MOST_STEPS, _STEPS_AVERAGED = 8, 4
"""Of a row of steps whose ranks do not all advance alike: how many are simulated, and of how many the mean is taken."""
_ALIKE = 1e-9


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with the time it takes place in, milliseconds from the start of the step."""

    action: Action
    start_ms: float
    end_ms: float


class BubbleFraction(float):
    """A step's bubble, and each rank's.

    As a number it is ``1 - work / longest span``, the zero-bubble papers' definition (arXiv:2401.10241); work is the
    mean over the ranks, which for even stages is ``m * (F + I + W)`` as in the papers. Its items, by rank, are
    ``1 - work / span``: the part of a rank's own span in which it waits.

    Args:
        work_ms: For each rank, the time it computes.
        span_ms: For each rank, the time from its first start to its last end.
    """

    per_rank: tuple[float, ...]

    def __new__(cls, work_ms: Sequence[float], span_ms: Sequence[float]) -> BubbleFraction:
        longest = max(span_ms)
        bubble = super().__new__(cls, 1 - sum(work_ms) / len(work_ms) / longest if longest else 0.0)
        bubble.per_rank = tuple(1 - work / span if span else 0.0 for work, span in zip(work_ms, span_ms, strict=True))
        return bubble

    def __getitem__(self, rank: int) -> float:
        return self.per_rank[rank]

    def __iter__(self) -> Iterator[float]:
        return iter(self.per_rank)

    def __len__(self) -> int:
        return len(self.per_rank)


@dataclass(frozen=True)
class Simulation:
    """What came out of simulating one step.

    Attributes:
        programs: The programs that were run.
        start_ms: For each rank and action, when it starts.
        end_ms: For each rank and action, when it ends.
        work_ms: For each rank, the time it computes.
        span_ms: For each rank, the time from the start of its first to the end of its last F, I, W or B.
        makespan: When everything has ended, reductions included, milliseconds.
        peak_memory: For each rank, the most it holds at any time, in the unit of ``StageCosts.held_after_forward``.
    """

    programs: tuple[Sequence[Action], ...]
    start_ms: tuple[tuple[float, ...], ...]
    end_ms: tuple[tuple[float, ...], ...]
    work_ms: tuple[float, ...]
    span_ms: tuple[float, ...]
    makespan: float
    peak_memory: tuple[float, ...]

    @property
    def bubble_fraction(self) -> BubbleFraction:
        """The part of the step in which ranks wait, as a number; its items are those of the single ranks."""
        return BubbleFraction(self.work_ms, self.span_ms)

    @cached_property
    def timeline(self) -> tuple[tuple[TimedAction, ...], ...]:
        """For each rank, its actions with their times, in the order of its program."""
        return tuple(
            tuple(map(TimedAction, program, starts, ends))
            for program, starts, ends in zip(self.programs, self.start_ms, self.end_ms, strict=True)
        )


def step_length(schedule: Programs, costs: StageCosts) -> tuple[float, float]:
    """Makespan and longest span of one step, milliseconds, as :func:`simulate` has them.

    Raises:
        ScheduleError: As there.
    """
    run = _run(schedule, costs)
    return run.makespan, max(map(_span, run.start, run.end, schedule.programs))


def simulate(schedule: Programs, costs: StageCosts) -> Simulation:
    """Simulate one step of ``schedule``; see ``Schedule.simulate``."""
    run = _run(schedule, costs)
    work = []
    for program, starts, ends in zip(schedule.programs, run.start, run.end, strict=True):
        computes = _computing(program)
        work.append(sum((ends[computes] - starts[computes]).tolist()))
    return Simulation(
        programs=schedule.programs,
        start_ms=tuple(tuple(starts.tolist()) for starts in run.start),
        end_ms=tuple(tuple(ends.tolist()) for ends in run.end),
        work_ms=tuple(work),
        span_ms=tuple(map(_span, run.start, run.end, schedule.programs)),
        makespan=run.makespan,
        peak_memory=peaks_of(schedule, costs),
    )


def time_in_a_row(schedule: Programs, costs: StageCosts) -> float:
    """The time from a step to the next, each rank beginning the next when it is done; see ``Schedule.time_in_a_row``.

    Ranks that wait in the first step wait less in the next ones, until all advance by the same time.
    """
    begin: tuple[float, ...] | None = None
    periods = []
    for _ in range(_MOST_STEPS):
        ended = _run(schedule, costs, begin).ended
        advance: list[float] = list(map(sub, ended, begin)) if begin is not None else []
        if begin is not None:
            periods.append(max(ended) - max(begin))
        if advance and max(advance) - min(advance) <= _ALIKE * max(advance):
            return max(advance)
        begin = ended
    return sum(periods[-_STEPS_AVERAGED:]) / _STEPS_AVERAGED


def _run(schedule: Programs, costs: StageCosts, begin_ms: Sequence[float] | None = None) -> Outcome:
    """The times of one step that ends; each rank begins at its ``begin_ms``, at 0 by default."""
    tables = CostTables.build(schedule.placement, costs, whole_batch_loss=schedule.whole_batch_loss)
    run = run_programs(schedule, tables, begin_ms)
    for rank, (starts, program) in enumerate(zip(run.start, schedule.programs, strict=True)):
        if len(starts) < len(program):
            raise ScheduleError(
                f"{schedule.name} deadlocks: rank {rank} waits for ever before {program[len(starts)]} "
                f"(cell {len(starts)}); validate() shows the rows around it"
            )
    return run


def _computing(program: Sequence[Action]) -> slice | npt.NDArray[np.bool_]:
    """Which actions of a program compute."""
    if isinstance(program, CodedProgram):
        return slice(None)
    return np.array([action.kind.is_compute for action in program], dtype=bool)


def _span(starts: Times, ends: Times, program: Sequence[Action]) -> float:
    """From the start of the first to the end of the last action that computes."""
    computes = _computing(program)
    starts, ends = starts[computes], ends[computes]
    return float(ends[-1] - starts[0]) if len(starts) else 0.0
