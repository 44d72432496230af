"""Where to cut a row of units so that the slowest rank is as fast as possible: exact where that is practical.

Nothing here knows of models. Letters: n blocks in a row, none of which is cut; S stages; p ranks.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lightning_pp.schedule import Placement

# Of two cuts that differ in time by no more than this, the one over which fewer bytes cross is better.
TIME_SLACK = 0.02
_PRECISION = 1e-3
_MOST_BACKS = 4
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Objective:
    """The measures of a cut; smaller is better, in the order of the fields.

    Attributes:
        rank_time: Time of the slowest rank.
        stage_time: Time of the slowest stage.
        crossing: Bytes that cross between ranks.
    """

    rank_time: float
    stage_time: float
    crossing: float

    def is_better_than(self, other: Objective) -> bool:
        """Whether this cut is the better one."""
        mine = (self.rank_time, self.stage_time, self.crossing)
        for ours, theirs in zip(mine, (other.rank_time, other.stage_time, other.crossing), strict=True):
            if abs(ours - theirs) > _ROUNDING * max(ours, theirs):
                return ours < theirs
        return False


@dataclass(frozen=True)
class CutProblem:
    """A row of blocks to cut into stages.

    Attributes:
        placement: Which rank holds which stages.
        times: For each block, the time of one microbatch on a rank of speed 1, in any unit. Shape (n).
        speeds: For each rank, how fast it is. Shape (p).
        fixed_bytes: For each block, what it holds all the time: parameters, gradients, optimizer state. Shape (n).
        held_bytes: For each block, what one microbatch holds between forward and backward. Shape (n).
        num_held: For each stage, the most microbatches that it holds at a time. Shape (S).
        limits: For each rank, the most bytes that it may hold; None for no limit. Shape (p).
        crossing: For each block, the bytes that cross if there is a cut before it; the first counts nothing. Shape (n).
    """

    placement: Placement
    times: Sequence[float]
    speeds: Sequence[float]
    fixed_bytes: Sequence[float]
    held_bytes: Sequence[float]
    num_held: Sequence[float]
    limits: Sequence[float] | None
    crossing: Sequence[float]

    @property
    def num_blocks(self) -> int:
        """The number of blocks, n."""
        return len(self.times)

    @cached_property
    def before(self) -> tuple[list[float], list[float], list[float]]:
        """Time on a rank of speed 1, fixed and held bytes of all blocks before each, and of all."""
        times, fixed, held = ([0.0, *accumulate(values)] for values in (self.times, self.fixed_bytes, self.held_bytes))
        return times, fixed, held

    def time(self, stage: int, start: int, stop: int) -> float:
        """Time of ``stage`` if it has blocks ``start`` to ``stop - 1``."""
        work = self.before[0]
        return (work[stop] - work[start]) / self.speeds[self.placement.rank_of_stage[stage]]

    def bytes(self, stage: int, start: int, stop: int) -> float:
        """What ``stage`` then holds at most."""
        _, fixed, held = self.before
        return fixed[stop] - fixed[start] + self.num_held[stage] * (held[stop] - held[start])

    def limit(self, rank: int) -> float:
        """The most bytes that ``rank`` may hold."""
        return float("inf") if self.limits is None else self.limits[rank]

    def may_have(self, stage: int, start: int, stop: int) -> bool:
        """Whether ``stage`` with these blocks holds no more than its rank may."""
        limit = self.limit(self.placement.rank_of_stage[stage])
        return self.bytes(stage, start, stop) <= limit * (1 + _ROUNDING)

    def bytes_of_ranks(self, starts: Sequence[int]) -> list[float]:
        """What each rank holds at most."""
        totals = [0.0] * self.placement.num_ranks
        for stage, (start, stop) in enumerate(self._ranges(starts)):
            totals[self.placement.rank_of_stage[stage]] += self.bytes(stage, start, stop)
        return totals

    def fits(self, starts: Sequence[int]) -> bool:
        """Whether no rank holds more than it may."""
        if self.limits is None:
            return True
        held = self.bytes_of_ranks(starts)
        return all(amount <= self.limit(rank) * (1 + _ROUNDING) for rank, amount in enumerate(held))

    def objective(self, starts: Sequence[int]) -> Objective:
        """The objective of a cut, given by the start indices of all stages, from 0."""
        rank_of_stage = self.placement.rank_of_stage
        ranks = [0.0] * self.placement.num_ranks
        slowest = 0.0
        for stage, (start, stop) in enumerate(self._ranges(starts)):
            time = self.time(stage, start, stop)
            ranks[rank_of_stage[stage]] += time
            slowest = max(slowest, time)
        crossing = sum(
            self.crossing[start]
            for stage, start in enumerate(starts)
            if stage and rank_of_stage[stage] != rank_of_stage[stage - 1]
        )
        return Objective(max(ranks), slowest, crossing)

    def _ranges(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        return list(zip(starts, [*starts[1:], self.num_blocks], strict=True))


def balanced_starts(problem: CutProblem) -> list[int] | None:
    """Start index of every stage such that the slowest rank is as fast as possible, within the memory limits.

    With one stage on each rank, and with two in a V, the time of the slowest rank is the least there is (dynamic
    programming over cuts, for a V from both ends at once). With several stages in another placement, the slowest stage
    is as fast as possible, and the cuts are then moved one by one as long as a rank gains by it. Among cuts within
    :data:`TIME_SLACK` of that time, those with the fewest bytes crossing are taken.

    Returns:
        The start indices, or None if nothing fits the memory limits.
    """
    kind = problem.placement.kind
    if kind == "one chunk":
        return _fewest_bytes(problem, _least_slowest_stage(problem))
    if kind == "V" and problem.placement.num_ranks > 1:
        starts = _balanced_v(problem)
        return None if starts is None else _moved(problem, starts)
    candidates = [_least_slowest_stage(replace(problem, limits=None)), _roomiest(problem)]
    moved = [_moved(problem, starts) for starts in candidates if starts is not None]
    legal = [starts for starts in moved if problem.fits(starts)]
    return min(legal, key=lambda starts: problem.objective(starts).rank_time, default=None)


def even_starts(problem: CutProblem) -> list[int] | None:
    """Start index of every stage such that the squares of the times of stages add up to least: stages alike.

    Where a rank has several stages, a schedule fits stages that are alike better, even if ranks are less so. None if
    a stage alone, or a rank, holds more than it may then.
    """

    def squared(stage: int, start: int, stop: int) -> float:
        return problem.time(stage, start, stop) ** 2

    starts = _cheapest(problem, squared, operator.add)
    return starts if starts is not None and problem.fits(starts) else None


def _roomiest(problem: CutProblem) -> list[int]:
    """The cut whose fullest rank holds least."""
    count, num_stages = problem.num_blocks, problem.placement.num_stages
    best = _cheapest(problem, problem.bytes, max)
    assert best is not None

    def held(starts: list[int]) -> float:
        return max(problem.bytes_of_ranks(starts))

    while num_stages > problem.placement.num_ranks:
        other = min(_neighbours(best, count), key=held, default=best)
        if held(other) >= held(best) * (1 - _ROUNDING):
            break
        best = other
    return best


def _least_slowest_stage(problem: CutProblem) -> list[int] | None:
    def cost(stage: int, start: int, stop: int) -> float | None:
        return problem.time(stage, start, stop) if problem.may_have(stage, start, stop) else None

    return _cheapest(problem, cost, max)


def _cheapest(
    problem: CutProblem,
    cost: Callable[[int, int, int], float | None],
    joined: Callable[[float, float], float],
    crossing: Sequence[float] | None = None,
) -> list[int] | None:
    """Cuts with the least cost of all stages, by dynamic programming; None if there are none.

    Args:
        problem: The row of blocks.
        cost: Of ``(stage, start, stop)``: a stage with the blocks from ``start`` to ``stop``. It grows with their
            number, and is not negative. None: the stage may not have so many.
        joined: The cost of a stage and those after it: the largest, or the sum.
        crossing: If given, cuts have the least sum of these numbers first: for each block, of a cut before it.
    """
    count, num_stages = problem.num_blocks, problem.placement.num_stages
    before = [*(crossing or [0.0] * count), 0.0]
    infinite = (float("inf"), float("inf"))
    best = [[infinite] * (count + 1) for _ in range(num_stages + 1)]  # best[s][i]: stages s.. take blocks i..
    choice = [[0] * (count + 1) for _ in range(num_stages)]
    best[num_stages][count] = (0.0, 0.0)
    for stage in range(num_stages - 1, -1, -1):
        left = num_stages - stage - 1
        for start in range(stage, count - left):
            for stop in range(start + 1, count - left + 1):
                own = cost(stage, start, stop)
                if own is None or (crossing is None and own >= best[stage][start][1]):
                    break  # costs grow with the number of blocks
                behind = best[stage + 1][stop]
                total = (before[stop] + behind[0], joined(own, behind[1]))
                if total < best[stage][start]:
                    best[stage][start], choice[stage][start] = total, stop
    if best[0][0] == infinite:
        return None
    starts = [0]
    for stage in range(num_stages - 1):
        starts.append(choice[stage][starts[-1]])
    return starts


def _fewest_bytes(problem: CutProblem, starts: list[int] | None) -> list[int] | None:
    """Among cuts of one stage a rank that are hardly slower than ``starts``, the one with the fewest bytes crossing."""
    if starts is None:
        return None
    allowed = problem.objective(starts).rank_time * (1 + TIME_SLACK)

    def squared(stage: int, start: int, stop: int) -> float | None:
        time = problem.time(stage, start, stop)
        return time * time if time <= allowed and problem.may_have(stage, start, stop) else None

    return _cheapest(problem, squared, operator.add, problem.crossing)


def _balanced_v(problem: CutProblem) -> list[int] | None:
    """The least time of the slowest rank, to :data:`_PRECISION`, where rank r holds stages r and 2p - 1 - r."""
    low = sum(problem.times) / sum(problem.speeds)
    most = sum(problem.times) / min(problem.speeds) * (1 + _ROUNDING)
    # the less time, the fewer cuts there are to look at
    best = next(filter(None, (_v_within(problem, time) for time in (1.05 * low, 1.3 * low, most))), None)
    if best is None:
        return None
    high = problem.objective(best).rank_time
    while high > low * (1 + _PRECISION):
        middle = (low + high) / 2
        starts = _v_within(problem, middle)
        if starts is None:
            low = middle
        else:
            best, high = starts, min(middle, problem.objective(starts).rank_time)
    return best


def _v_within(problem: CutProblem, time: float) -> list[int] | None:
    """Cuts of a V such that no rank takes longer than ``time`` or holds more than it may.

    Rank after rank takes blocks from both ends of the row; what is left is blocks i to j - 1. For each i the least j
    leaves the least work, but perhaps too few blocks, so the :data:`_MOST_BACKS` least are looked at.
    """
    p = problem.placement.num_ranks
    work, fixed, held = problem.before
    left: list[dict[tuple[int, int], tuple[int, int]]] = [{(0, problem.num_blocks): (0, 0)}]
    for rank in range(p):
        down, up, num_left = problem.num_held[rank], problem.num_held[2 * p - 1 - rank], 2 * (p - 1 - rank)
        speed, limit = problem.speeds[rank], problem.limit(rank) * (1 + _ROUNDING)
        most_left = time * sum(problem.speeds[rank + 1 :])
        reached: dict[tuple[int, int], tuple[int, int]] = {}
        for front, back in _with_least_backs(left[-1]):
            for stop in range(front + 1, back - num_left):
                spent = (work[stop] - work[front]) / speed
                full = fixed[stop] - fixed[front] + down * (held[stop] - held[front])
                if spent > time or full > limit:
                    break
                # what is left of any more blocks is too much for the other ranks
                last = bisect_right(work, work[stop] + most_left * (1 + 2 * _ROUNDING))
                first, last = (stop + num_left, min(back - 1, last)) if num_left else (stop, stop)
                for start in range(last, first - 1, -1):
                    longer = spent + (work[back] - work[start]) / speed
                    fuller = full + (fixed[back] - fixed[start] + up * (held[back] - held[start]))
                    if longer > time or fuller > limit:
                        break
                    is_new = not num_left or (stop, start) not in reached
                    if is_new and work[start] - work[stop] <= most_left * (1 + _ROUNDING):
                        reached[stop, start] = (front, back)
        if not reached:
            return None
        left.append(reached)
    ends = [next(iter(left[p]))]
    for reached in left[:0:-1]:
        ends.append(reached[ends[-1]])
    # from the inside out: rank p - 1 has blocks ends[1][0] to ends[0][0] - 1 and ends[0][1] to ends[1][1] - 1
    return [*(front for front, _ in ends[:0:-1]), *(back for _, back in ends[:-1])]


def _with_least_backs(reached: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    by_front: dict[int, list[int]] = {}
    for front, back in reached:
        by_front.setdefault(front, []).append(back)
    return [(front, back) for front, backs in by_front.items() for back in sorted(backs)[:_MOST_BACKS]]


def _moved(problem: CutProblem, starts: list[int]) -> list[int]:
    """Moves one cut at a time as long as that makes the cut better."""
    best = problem.objective(starts)
    is_legal = problem.fits(starts)
    improved = True
    while improved:
        improved = False
        for other in _neighbours(starts, problem.num_blocks):
            legal = problem.fits(other)
            objective = problem.objective(other)
            if (legal and not is_legal) or (legal == is_legal and objective.is_better_than(best)):
                starts, best, is_legal, improved = other, objective, legal, True
                break
    return starts


def _neighbours(starts: Sequence[int], count: int) -> list[list[int]]:
    found = []
    stops = [*starts[1:], count]
    for stage in range(1, len(starts)):
        for start in (*range(starts[stage - 1] + 1, starts[stage]), *range(starts[stage] + 1, stops[stage])):
            found.append([*starts[:stage], start, *starts[stage + 1 :]])
    return found
