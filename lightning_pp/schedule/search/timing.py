"""Earliest and latest times of given orders, and their quality."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from lightning_pp.schedule.program.coded import B, F
from lightning_pp.schedule.search.problem import Orders, Problem

T = TypeVar("T")
Times = list[list[float]]
"""For each rank, the start of each action of its order, milliseconds."""


@dataclass(frozen=True)
class Length:
    """How long a step takes.

    Attributes:
        makespan: From the first start to the last end: the time of a step alone.
        longest_span: The most that a rank takes from its first start to its last end: the time of a step in a row,
            where a rank that has finished its part starts the next step.
        first: For each rank, its first start.
    """

    makespan: float
    longest_span: float
    first: tuple[float, ...]

    def due(self) -> list[float]:
        """For each rank, the latest end that makes neither makespan nor longest span worse."""
        return [min(self.makespan, first + self.longest_span) for first in self.first]


@dataclass(frozen=True)
class Objective:
    """What the search minimises: the longest span, among schedules whose makespan is nearly the best.

    Attributes:
        longest_makespan: Makespans up to this count as good; 0 while the best one is still looked for.
    """

    longest_makespan: float = 0.0

    def score(self, makespan: float, longest_span: float) -> float:
        """Smaller is better, milliseconds."""
        if not self.longest_makespan:
            return makespan + 0.1 * longest_span
        return longest_span + 10.0 * max(0.0, makespan - self.longest_makespan)

    def of(self, length: Length) -> float:
        """The score of ``length``."""
        return self.score(length.makespan, length.longest_span)


def find_length(problem: Problem, orders: Orders, starts: Times) -> Length:
    """Measure the outcome of :func:`earliest`."""
    m, duration = problem.num_microbatches, problem.duration
    ends = [times[-1] + duration[order[-1] // m] for times, order in zip(starts, orders, strict=True)]
    first = tuple(times[0] for times in starts)
    return Length(max(ends), max(end - begin for end, begin in zip(ends, first, strict=True)), first)


def earliest(problem: Problem, orders: Sequence[Sequence[int]], begin: Sequence[float] | None = None) -> Times | None:
    """Start every action as early as its order allows; None if the orders deadlock.

    ``begin`` is when each rank can start; by default at 0.
    """
    tables = problem.by_code
    duration, needs, latency, publishes = tables.duration, tables.needs, tables.needs_latency, tables.publishes
    done = [-1.0] * (3 * problem.num_stages * problem.num_microbatches)
    waiting: dict[int, int] = {}
    starts: Times = [[] for _ in orders]
    clock = [0.0] * len(orders) if begin is None else list(begin)
    ready = list(range(len(orders)))[::-1]
    while ready:
        rank = ready.pop()
        now, times, order = clock[rank], starts[rank], orders[rank]
        for code in order[len(times) :] if times else order:
            needed = needs[code]
            if needed >= 0:
                arrived = done[needed]
                if arrived < 0.0:
                    waiting[needed] = rank
                    break
                arrived += latency[code]
                if arrived > now:
                    now = arrived
            times.append(now)
            now += duration[code]
            published = publishes[code]
            done[published] = now
            if published in waiting:
                ready.append(waiting.pop(published))
        clock[rank] = now
    return None if waiting else starts


def lower_bound(problem: Problem, objective: Objective) -> float:
    """No orders have a lower score: a rank starts when its first input can be there, and has its work to do."""
    n, duration = problem.num_stages, problem.duration
    head = [0.0] * n
    for before, stage in pairwise(range(n)):
        head[stage] = head[before] + duration[before] + problem.needs_latency[stage]
    makespan = span = 0.0
    for rank in range(problem.placement.num_ranks):
        stages = problem.placement.stages_of_rank(rank)
        work = problem.num_microbatches * sum(duration[kind * n + stage] for stage in stages for kind in (F, B))
        makespan = max(makespan, min(head[stage] for stage in stages) + work)
        span = max(span, work)
    return objective.score(makespan, span)


def backwards(rows: Iterable[Sequence[T]]) -> list[list[T]]:
    """Each of ``rows`` from its end to its start."""
    return [list(row[::-1]) for row in rows]


def mirrored_starts(problem: Problem, orders: Orders, due: Sequence[float]) -> tuple[Orders, Times]:
    """The orders of the mirrored problem, and its earliest starts: from the latest end of all, back to each end.

    ``due`` has the latest end of each rank.
    """
    mirrored, end = backwards(orders), max(due)
    starts = earliest(problem.mirrored, mirrored, [end - each for each in due])
    assert starts is not None, "orders must be free of deadlock"
    return mirrored, starts


def latest(problem: Problem, orders: Orders, due: Sequence[float]) -> Times:
    """Start every action as late as its order and the latest end of each rank allow."""
    end, duration = max(due), problem.by_code.duration
    pairs = zip(*mirrored_starts(problem, orders, due), strict=True)
    return backwards([end - time - duration[code] for code, time in zip(*pair, strict=True)] for pair in pairs)
