"""Run a schedule against costs, without a model: when each action starts, what waits, what is held.

Receives block and sends do not: a rank runs its actions in order, each as soon as the rank is free and what the action
needs has arrived. Gathers and reductions run one after the other beside the computation of their rank. So do copies to
the host, and copies back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import TYPE_CHECKING

import numpy as np

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.program.action import Action
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.execution import CostTables, Execution, Times
from lightning_pp.schedule.simulation.memory import peaks_of

if TYPE_CHECKING:
    from lightning_pp.schedule.schedule import Schedule

_MOST_NUMBERS = 1 << 20
"""Of how many actions :class:`LongestSpans` keeps times at once, 24 bytes for each."""
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


def step_length(schedule: Schedule, costs: StageCosts) -> tuple[float, float]:
    """Makespan and longest span of one step, milliseconds, as :func:`simulate` has them.

    Raises:
        ScheduleError: As there.
    """
    run = _complete_execution(schedule).run(CostTables.build(schedule.placement, schedule.priced(costs)))
    return run.makespan, float(run.spans().max())


def simulate(schedule: Schedule, costs: StageCosts) -> Simulation:
    """Simulate one step of ``schedule``; see ``Schedule.simulate``."""
    execution = _complete_execution(schedule)
    run = execution.run(CostTables.build(schedule.placement, schedule.priced(costs)))
    return Simulation(
        programs=schedule.programs,
        start_ms=tuple(tuple(run.start[slots].tolist()) for slots in execution.slots),
        end_ms=tuple(tuple(run.end[slots].tolist()) for slots in execution.slots),
        work_ms=tuple(sum((run.end[slots] - run.start[slots]).tolist()) for slots in execution.computing()),
        span_ms=tuple(run.spans().tolist()),
        makespan=run.makespan,
        peak_memory=peaks_of(schedule, costs),
    )


def time_in_a_row(schedule: Schedule, costs: StageCosts) -> float:
    """The time from a step to the next, each rank beginning the next when it is done; see ``Schedule.time_in_a_row``.

    Ranks that wait in the first step wait less in the next ones, until all advance by the same time.
    """
    execution, tables = _complete_execution(schedule), CostTables.build(schedule.placement, schedule.priced(costs))
    begin = execution.run(tables).ended
    periods = []
    for _ in range(_MOST_STEPS - 1):
        ended = execution.run(tables, begin).ended
        advance: list[float] = list(map(sub, ended, begin))
        if max(advance) - min(advance) <= _ALIKE * max(advance):
            return max(advance)
        periods.append(max(ended) - max(begin))
        begin = ended
    return sum(periods[-_STEPS_AVERAGED:]) / _STEPS_AVERAGED


class LongestSpans:
    """Gives the longest span of a step of one schedule for any costs; messages, gathers and reductions take no time.

    Args:
        schedule: The programs.

    Attributes:
        most_at_once: So many costs are taken together; more take more memory.

    Raises:
        ScheduleError: A rank waits for ever.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._execution = _complete_execution(schedule)
        self.most_at_once = max(1, _MOST_NUMBERS // max(1, len(self._execution.rows)))

    def of(self, times: Times) -> Times:
        """The longest span of each.

        Args:
            times: Of F, I and W on each stage. Shape (3, number of costs, stages).

        Returns:
            The longest span of a rank, in the same unit. Shape (number of costs).
        """
        if not times.shape[1]:
            return np.empty(0)
        parts = np.split(times, range(self.most_at_once, times.shape[1], self.most_at_once), axis=1)
        return np.concatenate([self._of_some(part) for part in parts])

    def _of_some(self, times: Times) -> Times:
        forward, backward_input, weight = (kind.T for kind in times)
        nothing = np.zeros((5 * len(forward), times.shape[1]))
        duration = np.concatenate((forward, backward_input, weight, backward_input + weight, nothing))
        run = self._execution.run(CostTables(duration, np.zeros((len(duration), 1))))
        return np.asarray(run.spans().max(axis=0))


def _complete_execution(schedule: Schedule) -> Execution:
    """The execution of a schedule, all of whose actions run.

    Raises:
        ScheduleError: A rank waits for ever.
    """
    execution = schedule.execution
    for rank, (slots, program) in enumerate(zip(execution.slots, schedule.programs, strict=True)):
        if len(slots) < len(program):
            raise ScheduleError(
                f"{schedule.name} deadlocks: rank {rank} waits for ever before {program[len(slots)]} "
                f"(cell {len(slots)}); validate() shows the rows around it"
            )
    return execution
