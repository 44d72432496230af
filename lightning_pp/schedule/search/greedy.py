"""Build orders greedily: every rank chooses its next action as soon as it is free.

This is the automatic schedule of arXiv:2401.10241 (appendix) as an event simulation, for any placement and any costs. A
rank knows what has arrived and what is on its way, keeps to its memory limit, and wants I after F and F after I. A
policy says how long it waits for something better than what is there, and how well a W must fit into a wait. Different
policies are good for different costs and limits; the caller tries many.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from lightning_pp.schedule.program.coded import B, F, I, W
from lightning_pp.schedule.search.deadline import NEVER, Deadline
from lightning_pp.schedule.search.problem import UNLIMITED, Orders, Problem

_EPSILON = 1e-9
_EVENTS_BETWEEN_LOOKS = 4096
"""Looks at the deadline."""
_ClassRows = list[list[tuple[int, int]]]
"""For each rank, kind and stage of what it may do, the most wanted first."""


@dataclass(frozen=True)
class Policy:
    """How a rank chooses. The fractions are of the duration of the action that would run instead.

    Attributes:
        weight_fit: A W is done in a wait that is at least this fraction of it: 1 never delays what is on its way.
        forward_waits: F waits for an I that arrives within this fraction.
        input_waits: I waits for an F that arrives within this fraction.
        same_waits: An action waits for one of its kind on a deeper stage that arrives within this fraction.
    """

    weight_fit: float = 1.0
    forward_waits: float = 1.0
    input_waits: float = 0.0
    same_waits: float = 1.0


def build_greedy(problem: Problem, policy: Policy, deadline: Deadline = NEVER) -> Orders | None:
    """Orders by ``policy``; None if the policy leads to a deadlock, or the deadline passes."""
    return _Construction(problem, policy).run(deadline)


class _Construction:
    """The state of one construction. Microbatches are alike, so each stage takes them in their order."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        n, m = problem.num_stages, problem.num_microbatches
        self.problem = problem
        self.num_stages = n
        self.policy = policy
        self.stages = [problem.placement.stages_of_rank(rank)[::-1] for rank in range(problem.placement.num_ranks)]
        self.arrivals: list[list[list[float]]] = [[[] for _ in range(n)], [[] for _ in range(n)]]
        self.arrivals[F][0] = [0.0] * m
        self.done = [[0] * n, [0] * n, [0] * n]
        self.reserve = self._reserves()
        self.wanted = self._wanted()

    def _reserves(self) -> list[float]:
        """What must be free for F of each stage: its own, and one microbatch on each deeper stage of the rank.

        With that reserve a rank can always take the next step of the microbatch that is furthest along, so that
        memory cannot deadlock.
        """
        n = self.problem.num_stages
        forward = self.problem.held_change[:n]
        reserve = [0.0] * n
        for stages in self.stages:
            deeper = 0.0
            for stage in stages:
                reserve[stage] = deeper + forward[stage]
                deeper += forward[stage]
        return reserve

    def _wanted(self) -> tuple[_ClassRows, _ClassRows]:
        """What each rank wants, most wanted first, after an F and after an I: the other of the two."""
        forwards = [[(F, stage) for stage in stages] for stages in self.stages]
        inputs = [[(I, stage) for stage in stages] for stages in self.stages]
        after_forward = [second + first for first, second in zip(forwards, inputs, strict=True)]
        return after_forward, [first + second for first, second in zip(forwards, inputs, strict=True)]

    def run(self, deadline: Deadline) -> Orders | None:
        problem = self.problem
        n, m, num_ranks = problem.num_stages, problem.num_microbatches, problem.placement.num_ranks
        rank_of_stage, duration, change = problem.placement.rank_of_stage, problem.duration, problem.held_change
        feeds, feeds_latency = problem.feeds, problem.feeds_latency
        arrivals, done = self.arrivals, self.done
        held, free, last = [0.0] * num_ranks, [0.0] * num_ranks, [I] * num_ranks
        orders: Orders = [[] for _ in range(num_ranks)]
        events = [(0.0, rank) for rank in range(num_ranks)]
        for number in count():
            if not events:
                break
            if number % _EVENTS_BETWEEN_LOOKS == 0 and deadline.has_passed():
                return None
            now, rank = heappop(events)
            if free[rank] > now:
                continue
            kind, stage, wake = self._decide(rank, now, held[rank], last[rank])
            if kind < 0:
                if wake < UNLIMITED:
                    heappush(events, (wake, rank))
                continue
            row = kind * n + stage
            if kind == B:
                done[W][stage] += 1
            microbatch = done[I if kind == B else kind][stage]
            done[I if kind == B else kind][stage] = microbatch + 1
            orders[rank].append(row * m + microbatch)
            held[rank] += change[row]
            end = free[rank] = now + duration[row]
            heappush(events, (end, rank))
            if kind == W:
                continue
            last[rank] = F if kind == F else I
            fed = feeds[row]
            if fed >= 0:
                fed_kind, fed_stage = divmod(fed, n)
                arrival = end + feeds_latency[row]
                if problem.whole_batch_loss and fed_kind == I and kind == F:
                    if done[F][stage] < m:
                        continue
                    arrivals[I][stage] = [arrival] * m
                else:
                    arrivals[fed_kind][fed_stage].append(arrival)
                heappush(events, (arrival, rank_of_stage[fed_stage]))
        complete = all(weights == m for weights in done[W])
        return orders if complete else None

    def _decide(self, rank: int, now: float, held: float, last: int) -> tuple[int, int, float]:
        """Kind and stage of the next action; kind -1 to wait, with the time to think again."""
        problem, policy = self.problem, self.policy
        n, duration, limit = self.num_stages, problem.duration, problem.limits[rank] + _EPSILON
        done = self.done
        _, done_input, done_weight = done
        weight = -1
        for stage in self.stages[rank]:
            if done_weight[stage] < done_input[stage]:
                weight = stage
                break
        soon_forward = soon_input = UNLIMITED
        for kind, stage in self.wanted[last][rank]:
            count, arrived = done[kind][stage], self.arrivals[kind][stage]
            if count >= len(arrived):
                continue
            arrival = arrived[count]
            if kind == F:
                if held + self.reserve[stage] > limit:
                    if weight >= 0 and arrival <= now:
                        return W, weight, now
                    continue
                if arrival > now:
                    soon_forward = min(soon_forward, arrival)
                    continue
                long = duration[stage]
                if soon_forward - now < policy.same_waits * long or soon_input - now < policy.forward_waits * long:
                    continue
                return F, stage, now
            if arrival > now:
                soon_input = min(soon_input, arrival)
                continue
            row = I * n + stage
            long = duration[row]
            if soon_input - now < policy.same_waits * long or soon_forward - now < policy.input_waits * long:
                continue
            if held + problem.held_change[row] > limit:
                # I would hold more than F did: make room, or do the whole backward at once.
                return (W, weight, now) if weight >= 0 else (B, stage, now)
            return I, stage, now
        soon = min(soon_forward, soon_input)
        if weight >= 0 and soon - now >= policy.weight_fit * duration[W * n + weight] - _EPSILON:
            return W, weight, now
        return -1, -1, soon
