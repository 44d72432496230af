"""Improve given orders by moving single critical actions: simulated annealing (Kirkpatrick, Gelatt and Vecchi, 1983).

An action is critical when it cannot start later without making the step longer; only moves of such actions can help.
Microbatches are alike, so on each stage they keep their order; that loses nothing, and leaves fewer orders to visit.
A move that makes the step longer is accepted now and then, less often for more, and less and less often; the acceptance
is warmed up again a few times. The random numbers are seeded, so the result is the same each time.
"""

from __future__ import annotations

from math import log
from random import Random

from lightning_pp.schedule.program.coded import W
from lightning_pp.schedule.search.deadline import Deadline
from lightning_pp.schedule.search.problem import Orders, Problem
from lightning_pp.schedule.search.timing import Objective, Times, earliest, find_length, latest

_EPSILON = 1e-9
_COOLING = 0.1
"""The last temperature, as a part of the first."""
_NUM_CYCLES = 2
_MAX_DISTANCE = 12
_MAX_DRAWS = 200


class Climb:
    """A search that starts from given orders.

    Args:
        problem: Costs and limits.
        orders: Legal orders within the limits.
        objective: What is best.
        seed: Seed of the moves.
    """

    def __init__(self, problem: Problem, orders: Orders, objective: Objective, seed: int) -> None:
        self.problem = problem
        self.objective = objective
        self.random = Random(seed)
        self.orders = [list(order) for order in orders]
        starts = earliest(problem, self.orders)
        assert starts is not None, "orders must be free of deadlock"
        self.score = self._score(starts)
        self.critical = self._critical(starts)

    def run(self, num_steps: int, lower_bound: float, hot: float, deadline: Deadline) -> Orders:
        """The best orders found in ``num_steps`` moves, never worse than those at the start.

        Args:
            num_steps: Number of moves to try; each costs a simulation.
            lower_bound: Stop when the score has come down to this.
            hot: How much worse a move may be at first, as a part of the score; 0 accepts nothing worse.
            deadline: Stop with the best when it has passed.
        """
        best, best_score = [list(order) for order in self.orders], self.score
        cooling = _COOLING ** (1 / max(1, num_steps // _NUM_CYCLES))
        temperature = hot * best_score
        for step in range(num_steps):
            if best_score <= lower_bound + _EPSILON or deadline.has_passed():
                break
            if step % max(1, num_steps // _NUM_CYCLES) == 0:
                temperature = hot * best_score
            temperature *= cooling
            move = next(filter(None, (self._propose() for _ in range(_MAX_DRAWS))), None)
            if move is None:
                break
            rank, source, target = move
            order = self.orders[rank]
            order.insert(target, order.pop(source))
            starts = earliest(self.problem, self.orders)
            score = None if starts is None else self._score(starts)
            if starts is None or score is None or score > self.score - temperature * log(1.0 - self.random.random()):
                order.insert(source, order.pop(target))
                continue
            self.score = score
            self.critical = self._critical(starts)
            if score < best_score - _EPSILON:
                best, best_score = [list(each) for each in self.orders], score
        return best

    def _score(self, starts: Times) -> float:
        return self.objective.of(find_length(self.problem, self.orders, starts))

    def _critical(self, starts: Times) -> list[tuple[int, int]]:
        """Rank and position of every critical action."""
        due = find_length(self.problem, self.orders, starts).due()
        late = latest(self.problem, self.orders, due)
        return [
            (rank, position)
            for rank, (early_times, late_times) in enumerate(zip(starts, late, strict=True))
            for position, (early_time, late_time) in enumerate(zip(early_times, late_times, strict=True))
            if late_time - early_time < 1e-6
        ]

    def _propose(self) -> tuple[int, int, int] | None:
        """A rank, a position and a new position, legal on the rank itself; None if this draw has none."""
        rank, position = self.random.choice(self.critical)
        order = self.orders[rank]
        distance = 1 + int(self.random.random() ** 2 * _MAX_DISTANCE)
        if order[position] // self.problem.num_microbatches // self.problem.num_stages == W:
            distance *= 2
        target = position - distance if self.random.random() < 0.5 else position + distance
        target = self._reachable(order, position, max(0, min(len(order) - 1, target)))
        if target == position or not self._fits(rank, position, target):
            return None
        return rank, position, target

    def _reachable(self, order: list[int], position: int, target: int) -> int:
        """How far the action can go towards ``target`` without passing what it needs or what needs it."""
        problem, m = self.problem, self.problem.num_microbatches
        row, microbatch = divmod(order[position], m)
        backward = target < position
        tables = (problem.needs, problem.needs_own) if backward else (problem.feeds, problem.feeds_own)
        # In published rows, where a B stands for the I that others look for.
        bounds = {other[row] * m + microbatch for other in tables if other[row] >= 0}
        step = -1 if backward else 1
        for index in range(position + step, target + step, step):
            other_row = order[index] // m
            if (
                problem.publishes[other_row] == problem.publishes[row]
                or order[index] + (problem.publishes[other_row] - other_row) * m in bounds
            ):
                return index - step
        return target

    def _fits(self, rank: int, source: int, target: int) -> bool:
        """True when the rank stays within its limit after the move."""
        problem, m = self.problem, self.problem.num_microbatches
        limit = problem.limits[rank] + _EPSILON
        order, held_change = self.orders[rank], problem.held_change
        moved = held_change[order[source] // m]
        if (target < source) == (moved <= 0):
            return True
        low, high = min(source, target), max(source, target)
        held = sum(held_change[code // m] for code in order[:low])
        if target < source:
            held += moved
            if held > limit:
                return False
            between = order[low:high]
        else:
            between = order[low + 1 : high + 1]
        for code in between:
            held += held_change[code // m]
            if held > limit:
                return False
        return True
