"""Orders for a step whose loss needs the whole batch, in two phases that are searched separately.

With ``whole_batch_loss`` every F has ended when the last forward of the last stage has, and no backward starts earlier
(:mod:`lightning_pp.schedule.program.whole_batch`). So a step is a problem of F alone and then one of I and W alone, in
which all ranks are free from the start; its makespan is the sum of theirs, and the best of each make the best step.
What is found without regard to the constraint serves as well: it is taken apart into its F and its backwards, in their
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_pp.schedule.program.coded import I, W
from lightning_pp.schedule.search.deadline import NEVER, Deadline
from lightning_pp.schedule.search.justify import justify
from lightning_pp.schedule.search.problem import UNLIMITED, Orders, Problem
from lightning_pp.schedule.search.timing import Objective, earliest, find_length
from lightning_pp.schedule.simulation.memory import exceeds

_NUM_JUSTIFIED = 4


def best_of_both_phases(
    problem: Problem, found: Sequence[Orders], *, improves: bool, deadline: Deadline = NEVER
) -> Orders:
    """The shortest forwards and the shortest backwards of all that was found, the backwards improved.

    Args:
        problem: Costs and limits; all microbatches fit the limits together.
        found: Legal orders, with or without regard to the constraint; some within the limits once F come first.
        improves: Whether the best backwards are improved.
        deadline: Stop improving when it has passed.
    """
    phases = [_phases(problem, orders) for orders in found if _fits(problem, orders)]
    objective = Objective()

    def score(orders: Orders) -> float:
        starts = earliest(problem, orders)
        assert starts is not None, "a phase of legal orders is free of deadlock"
        return objective.of(find_length(problem, orders, starts))

    forwards = min((forwards for forwards, _ in phases), key=score)
    # of those that take as long the one that holds least, which matters where I holds more than F
    backwards = sorted((rest for _, rest in phases), key=lambda rest: (round(score(rest), 9), _growth(problem, rest)))
    best = backwards[0]
    grows = any(change > 0 for change in problem.held_change[I * problem.num_stages : W * problem.num_stages])
    # where I frees, every order of the backwards is within the limits
    if improves and (not grows or min(problem.limits) == UNLIMITED):
        justified = [justify(problem, orders, objective, deadline=deadline) for orders in backwards[:_NUM_JUSTIFIED]]
        best = min(justified, key=score)
    return [first + rest for first, rest in zip(forwards, best, strict=True)]


def _growth(problem: Problem, backwards: Orders) -> float:
    """The most that a rank holds above what it holds after its F."""
    m = problem.num_microbatches
    return max(max(accumulate(problem.held_change[code // m] for code in order)) for order in backwards)


def _fits(problem: Problem, orders: Orders) -> bool:
    """Whether every rank is within its limit when the F come first."""
    ordered = (forwards + rest for forwards, rest in zip(*_phases(problem, orders), strict=True))
    peaks = (max(accumulate(problem.held_change[code // problem.num_microbatches] for code in o)) for o in ordered)
    return not any(map(exceeds, peaks, problem.limits))


def _phases(problem: Problem, orders: Orders) -> tuple[Orders, Orders]:
    """On each rank the F, and what follows them, both in their order."""
    end_of_forwards = problem.num_stages * problem.num_microbatches
    forwards = [[code for code in order if code < end_of_forwards] for order in orders]
    backwards = [[code for code in order if code >= end_of_forwards] for order in orders]
    return forwards, backwards
