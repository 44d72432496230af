"""ZB-V fitted to given costs by rounds: the greedy construction of arXiv:2405.15362.

After a warm-up that fills the V, every round gives each rank one backward and one forward. W, in the order of their I,
go where they fit into a wait, where memory is needed, and where a wait would make the rank's bubble larger than the
largest bubble anyway.
"""

from __future__ import annotations

from collections import deque

from lightning_pp.schedule.program.coded import F, I, W
from lightning_pp.schedule.search.problem import Orders, Problem

_EPSILON = 1e-9


def build_by_rounds(problem: Problem) -> Orders | None:
    """Orders for a V placement; None if the rounds get stuck, as they may under tight memory."""
    if any(change > 0 for change in problem.held_change[I * problem.num_stages : W * problem.num_stages]):
        return None  # the rounds make room for F only
    rounds = _Rounds(problem)
    return rounds.orders if rounds.run() else None


class _Rounds:
    """One construction. Rows are kind * num_stages + stage; rank r holds stages r and 2p - 1 - r."""

    def __init__(self, problem: Problem) -> None:
        n, m, p = problem.num_stages, problem.num_microbatches, problem.placement.num_ranks
        self.problem = problem
        self.end = [[-1.0] * m for _ in range(3 * n)]
        self.count = [0] * (3 * n)
        self.now = [0.0] * p
        self.held = [0.0] * p
        self.bubble = [0.0] * p
        self.largest_bubble = 0.0
        self.pending: list[deque[int]] = [deque() for _ in range(p)]
        self.orders: Orders = [[] for _ in range(p)]

    def run(self) -> bool:
        """Build everything; False if a round makes no progress."""
        p, n, m = self.problem.placement.num_ranks, self.problem.num_stages, self.problem.num_microbatches
        if not self._warm_up():
            return False
        while any(self.count[I * n + stage] < m for stage in range(n)):
            before = sum(self.count)
            self._backward_round(p, n, m)
            self._forward_round(p, n, m)
            if sum(self.count) == before:
                return False
        for rank in range(p):
            while self.pending[rank]:
                self._put_weight(rank)
        return True

    def _arrival(self, row: int) -> float | None:
        """When the next action of ``row`` could start for what it waits for; None if that is not placed yet."""
        microbatch = self.count[row]
        needed, own = self.problem.needs[row], self.problem.needs_own[row]
        arrival = 0.0
        for other, latency in ((needed, self.problem.needs_latency[row]), (own, 0.0)):
            if other >= 0:
                end = self.end[other][microbatch]
                if end < 0:
                    return None
                arrival = max(arrival, end + latency)
        return arrival

    def _put(self, rank: int, row: int, arrival: float) -> None:
        microbatch = self.count[row]
        if self.orders[rank]:
            self.bubble[rank] += max(0.0, arrival - self.now[rank])
            self.largest_bubble = max(self.largest_bubble, self.bubble[rank])
        self.now[rank] = max(self.now[rank], arrival) + self.problem.duration[row]
        self.end[row][microbatch] = self.now[rank]
        self.count[row] = microbatch + 1
        self.held[rank] += self.problem.held_change[row]
        self.orders[rank].append(row * self.problem.num_microbatches + microbatch)
        kind, stage = divmod(row, self.problem.num_stages)
        if kind == I:
            self.pending[rank].append(W * self.problem.num_stages + stage)

    def _put_weight(self, rank: int) -> None:
        self._put(rank, self.pending[rank].popleft(), 0.0)

    def _room_for(self, rank: int, row: int) -> bool:
        """Make room for F of ``row`` by W, if that is possible."""
        limit = self.problem.limits[rank] + _EPSILON
        while self.held[rank] + self.problem.held_change[row] > limit and self.pending[rank]:
            self._put_weight(rank)
        return self.held[rank] + self.problem.held_change[row] <= limit

    def _fill(self, rank: int, arrival: float) -> None:
        """W into the wait before ``arrival``: all that fit whole, and one more if the bubble would grow too much."""
        duration, pending = self.problem.duration, self.pending[rank]
        while pending and self.now[rank] + duration[pending[0]] <= arrival + _EPSILON:
            self._put_weight(rank)
        if pending and arrival - self.now[rank] > self.largest_bubble - self.bubble[rank] + _EPSILON:
            self._put_weight(rank)

    def _warm_up(self) -> bool:
        """F0 down the V; then, up the V, as many more F0 as fit before the first F1 arrives; then fill up with F."""
        p, n, m = self.problem.placement.num_ranks, self.problem.num_stages, self.problem.num_microbatches
        duration, change = self.problem.duration, self.problem.held_change
        for rank in range(p):
            if not self._put_forward(rank, rank):
                return False
        for rank in range(p - 1, -1, -1):
            deep = n - 1 - rank
            arrival = self._arrival(deep)
            while (
                rank < p - 1
                and arrival is not None
                and self.now[rank] + duration[rank] <= arrival + _EPSILON
                and self.count[rank] < m
                and self.held[rank] + 2 * change[rank] + rank * (change[rank] + change[deep])
                <= self.problem.limits[rank] + _EPSILON
            ):
                placed = [self._put_forward(upper, upper) for upper in range(rank + 1)]
                if not placed[-1]:
                    break
            if not self._put_forward(rank, deep):
                return False
        deep_turn = False
        for rank in range(1, p):
            while self._is_behind(rank, n, m):
                progress = False
                for lower in range(p - 1, rank - 1, -1) if deep_turn else range(rank, p):
                    row = n - 1 - lower if deep_turn else lower
                    progress |= self.count[row] < m and self._put_forward(lower, row)
                if not progress and deep_turn:
                    break
                deep_turn = not deep_turn
        return True

    def _is_behind(self, rank: int, n: int, m: int) -> bool:
        """True while the rank has fewer forwards than the one above it, or no F1 more than that one."""
        above, mine = (self.count[rank - 1], self.count[n - rank]), (self.count[rank], self.count[n - 1 - rank])
        return sum(mine) < sum(above) or mine[1] <= above[1] < m

    def _put_forward(self, rank: int, row: int) -> bool:
        """Place F of ``row`` if what it needs is placed and there is memory."""
        if self.count[row] >= self.problem.num_microbatches:
            return False
        arrival = self._arrival(row)
        if arrival is None or not self._room_for(rank, row):
            return False
        self._put(rank, row, arrival)
        return True

    def _backward_round(self, p: int, n: int, m: int) -> None:
        """One I on each rank: of chunk 0 where the rounds before made it ready, else of chunk 1."""
        shallow = {
            rank for rank in range(p) if self.count[I * n + rank] < m and self._arrival(I * n + rank) is not None
        }
        for rank in range(p):
            deep = I * n + n - 1 - rank
            if rank not in shallow and self.count[deep] < m and self._arrival(deep) is not None:
                self._put_backward(rank, deep)
        for rank in sorted(shallow, reverse=True):
            self._put_backward(rank, I * n + rank)

    def _put_backward(self, rank: int, row: int) -> None:
        arrival = self._arrival(row)
        if arrival is not None:
            self._fill(rank, arrival)
            self._put(rank, row, arrival)

    def _forward_round(self, p: int, n: int, m: int) -> None:
        """One F on each rank: of chunk 1 where it is ready, else of chunk 0."""
        for rank in range(p):
            rows = [row for row in (n - 1 - rank, rank) if self.count[F * n + row] < m]
            row = next((row for row in rows if self._arrival(row) is not None), None)
            if row is None or not self._room_for(rank, row):
                continue
            arrival = self._arrival(row)
            assert arrival is not None, "checked above"
            self._fill(rank, arrival)
            self._put(rank, row, arrival)
