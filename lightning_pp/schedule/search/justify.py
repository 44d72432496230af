"""Shorten given orders by moving actions into gaps, from both ends in turn.

This is the forward-backward improvement of resource-constrained scheduling (Valls, Ballestín and Quintanilla,
"Justification and RCPSP", 2005), with memory checked along the order instead of over time. A forward pass starts
everything as early as it can and moves later actions into the gaps before them; a backward pass does the mirror image.
A move only ever uses time in which the rank waits, so nothing else is delayed, and then everything closes up.
"""

from __future__ import annotations

from lightning_pp.schedule.search.deadline import NEVER, Deadline
from lightning_pp.schedule.search.problem import Orders, Problem
from lightning_pp.schedule.search.timing import Objective, Times, backwards, earliest, find_length, mirrored_starts

_EPSILON = 1e-9
PASSES_OF_A_ROUND = 4
"""Passes over all actions in filling gaps from one end."""
WINDOW = 60
"""How many actions before or after a gap are considered for it."""


def justify(
    problem: Problem,
    orders: Orders,
    objective: Objective,
    *,
    max_rounds: int = 12,
    patience: int = 2,
    deadline: Deadline = NEVER,
) -> Orders:
    """The best orders found by alternating forward and backward passes, never worse than ``orders``.

    Args:
        problem: Costs and limits.
        orders: Legal orders, within the limits.
        objective: What is best.
        max_rounds: Most pairs of passes.
        patience: Stop after so many pairs without gain.
        deadline: Stop with the best when it has passed.
    """
    starts = earliest(problem, orders)
    assert starts is not None, "orders must be free of deadlock"
    best, best_score = orders, objective.of(find_length(problem, orders, starts))
    without_gain = 0
    for _ in range(max_rounds):
        improved = False
        for forward in (True, False):
            if not deadline.allows(PASSES_OF_A_ROUND * problem.num_actions):
                return best
            if forward:
                orders = _filled(problem, orders, starts)
            else:
                due = find_length(problem, orders, starts).due()
                orders = backwards(_filled(problem.mirrored, *mirrored_starts(problem, orders, due)))
            starts = earliest(problem, orders)
            assert starts is not None, "moving into gaps keeps orders free of deadlock"
            score = objective.of(find_length(problem, orders, starts))
            if score < best_score - _EPSILON:
                best, best_score, improved = orders, score, True
        without_gain = 0 if improved else without_gain + 1
        if without_gain >= patience:
            break
    return best


def _filled(problem: Problem, orders: Orders, starts: Times) -> Orders:
    """Move actions into the gaps before them, the nearest that fits first."""
    m, tables, needs_own = problem.num_microbatches, problem.by_code, problem.needs_own
    duration, held_change, publishes = tables.duration, tables.held_change, tables.publishes
    needs, latency = tables.needs, tables.needs_latency
    end = [0.0] * (3 * problem.num_stages * m)
    for order, times in zip(orders, starts, strict=True):
        for code, time in zip(order, times, strict=True):
            end[publishes[code]] = time + duration[code]
    filled = []
    for order, old_times, limit in zip(orders, starts, problem.limits, strict=True):
        codes, times = list(order), list(old_times)
        limit += _EPSILON
        free, held, shortest = times[0], 0.0, min(map(duration.__getitem__, codes))
        for index in range(len(codes)):
            gap_end = times[index] + _EPSILON
            if times[index] - free > _EPSILON and free + shortest <= gap_end:
                inside = held + held_change[codes[index]]
                highest = max(held, inside)
                for other, code in enumerate(codes[index + 1 : index + WINDOW], index + 1):
                    change = held_change[code]
                    if free + duration[code] <= gap_end and (change <= 0 or highest + change <= limit):
                        row, begin = code // m, free
                        if needs[code] >= 0:
                            begin = max(begin, end[needs[code]] + latency[code])
                        if needs_own[row] >= 0:
                            begin = max(begin, end[code + (needs_own[row] - row) * m])
                        if begin + duration[code] <= gap_end:
                            del codes[other], times[other]
                            codes.insert(index, code)
                            times.insert(index, begin)
                            end[publishes[code]] = begin + duration[code]
                            break
                    inside += change
                    if inside > highest:
                        highest = inside
            held += held_change[codes[index]]
            free = times[index] + duration[codes[index]]
        filled.append(codes)
    return filled
