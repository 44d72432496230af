"""One step of all ranks on one clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import Action, ActionKind, Schedule, StageCosts

NAMES_OF_KINDS = {
    ActionKind.F: "forward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
    ActionKind.B: "backward",
    ActionKind.OFFLOAD: "free on the device",
    ActionKind.RELOAD: "copy back",
    ActionKind.UNSHARD: "gather",
    ActionKind.RESHARD: "free",
    ActionKind.REDUCE: "reduce gradients",
}


@dataclass(frozen=True)
class Timeline:
    """The times of all actions of all ranks in one step.

    Attributes:
        schedule: The programs that were run.
        ranks: For each rank, the times of its F, I, W and B in the order of its program, in milliseconds since the
            first of them on any rank began.
        unit: What a millisecond is called in pictures, where times are not milliseconds but relative.
        sharding: For each rank, the times of its other actions, which go on beside these: simulated from begin to end,
            measured only when they were begun. Empty where there is none.
    """

    schedule: Schedule
    ranks: tuple[tuple[ActionTimes, ...], ...]
    unit: str = "ms"
    sharding: tuple[tuple[ActionTimes, ...], ...] = ()

    @property
    def span_ms(self) -> float:
        """From the first start to the last end on any rank."""
        return max((moment.end_ms for times in (*self.ranks, *self.sharding) for moment in times), default=0.0)

    def bubble_fraction(self, rank: int) -> float:
        """``1 - work / span`` of one rank."""
        times = self.ranks[rank]
        span = times[-1].end_ms - times[0].start_ms + times[0].early_ms if times else 0.0
        return 1.0 - sum(moment.work_ms for moment in times) / span if span else 0.0

    def kinds(self) -> dict[ActionKind, str]:
        """The kinds of actions in it, with their names."""
        found = {moment.action.kind for times in (*self.ranks, *self.sharding) for moment in times}
        return {kind: name for kind, name in NAMES_OF_KINDS.items() if kind in found}

    @classmethod
    def simulated(cls, schedule: Schedule, costs: StageCosts, unit: str = "ms") -> Timeline:
        """The timeline of a step simulated with ``costs``."""
        ranks, sharding = [], []
        for timeline in schedule.simulate(costs).timeline:
            times: list[ActionTimes] = []
            beside: list[ActionTimes] = []
            for timed in timeline:
                if timed.action.kind.is_compute:
                    asked = times[-1].end_ms if times else 0.0
                    times.append(ActionTimes(timed.action, asked, timed.start_ms, timed.end_ms))
                else:
                    beside.append(ActionTimes(timed.action, timed.start_ms, timed.start_ms, timed.end_ms))
            ranks.append(times)
            sharding.append(beside)
        return cls._from_zero(schedule, ranks, sharding, [0.0] * len(ranks), unit)

    @classmethod
    def aligned(
        cls,
        schedule: Schedule,
        ranks: Sequence[Sequence[ActionTimes]],
        sharding: Sequence[Sequence[ActionTimes]] = (),
    ) -> Timeline:
        """Puts the ranks' times, each on the clock of its rank, on one clock.

        Clocks of hosts and devices do not agree, but messages tie them together: nothing starts before what it needs
        has ended elsewhere, so each direction between two ranks bounds the difference of their clocks from one side.
        The difference is taken between the bounds, the nearer to one the longer a rank stood waiting in its direction:
        who waited started as soon as the message came. What is left is an error of about one message's latency.

        Args:
            schedule: The programs that were run.
            ranks: For each rank, the times of its F, I, W and B.
            sharding: For each rank, those of its other actions, on the same clock.
        """
        return cls._from_zero(schedule, ranks, sharding, _clock_shifts(schedule, ranks), "ms")

    @classmethod
    def _from_zero(
        cls,
        schedule: Schedule,
        ranks: Sequence[Sequence[ActionTimes]],
        sharding: Sequence[Sequence[ActionTimes]],
        shifts: Sequence[float],
        unit: str,
    ) -> Timeline:
        """Moves each rank's times by its shift, and then all so that the first begins at 0."""
        starts = [
            moment.start_ms + shift
            for rows in (ranks, sharding)
            for times, shift in zip(rows, shifts, strict=False)
            for moment in times[:1]
        ]
        first = min(starts, default=0.0)

        def moved(rows: Sequence[Sequence[ActionTimes]]) -> tuple[tuple[ActionTimes, ...], ...]:
            return tuple(
                tuple(_shifted(moment, shift - first) for moment in times)
                for times, shift in zip(rows, shifts, strict=False)
            )

        return cls(schedule, moved(ranks), unit, moved(sharding) if any(sharding) else ())


def _shifted(moment: ActionTimes, by_ms: float) -> ActionTimes:
    return replace(
        moment, asked_ms=moment.asked_ms + by_ms, start_ms=moment.start_ms + by_ms, end_ms=moment.end_ms + by_ms
    )


@dataclass(frozen=True)
class _Bound:
    """One rank's clock has to be moved by at least this against another's.

    Attributes:
        shift_ms: The bound.
        wait_ms: The longest that the later rank waited for the earlier; 0 says that the bound may be loose.
    """

    shift_ms: float
    wait_ms: float

    def joined(self, other: _Bound | None) -> _Bound:
        if other is None:
            return self
        return _Bound(max(self.shift_ms, other.shift_ms), max(self.wait_ms, other.wait_ms))


def _clock_shifts(schedule: Schedule, ranks: Sequence[Sequence[ActionTimes]]) -> list[float]:
    """What to add to each rank's times, so that they are on the clock of rank 0."""
    bounds = _bounds(schedule, ranks)
    shifts: dict[int, float] = {0: 0.0}
    to_visit = deque([0])
    while to_visit:
        known = to_visit.popleft()
        for rank in range(len(ranks)):
            least, reverse = bounds.get((known, rank)), bounds.get((rank, known))
            if rank in shifts or (least is None and reverse is None):
                continue
            shifts[rank] = shifts[known] + _difference(least, reverse)
            to_visit.append(rank)
    return [shifts.get(rank, 0.0) for rank in range(len(ranks))]


def _bounds(schedule: Schedule, ranks: Sequence[Sequence[ActionTimes]]) -> dict[tuple[int, int], _Bound]:
    """For ranks (q, r), by how much at least r's times have to be moved against q's."""
    time_of = {moment.action: moment for times in ranks for moment in times}
    rank_of_stage = schedule.placement.rank_of_stage
    bounds: dict[tuple[int, int], _Bound] = {}
    for moment in time_of.values():
        for needed in needs(moment.action, schedule.placement.num_stages):
            pair = (rank_of_stage[needed.stage], rank_of_stage[moment.action.stage])
            if needed in time_of and pair[0] != pair[1]:
                bound = _Bound(time_of[needed].end_ms - moment.start_ms, moment.wait_ms)
                bounds[pair] = bound.joined(bounds.get(pair))
    return bounds


def _difference(least: _Bound | None, reverse: _Bound | None) -> float:
    """The shift of a rank against another, given by how much at least each has to be moved against the other."""
    if reverse is None:
        return least.shift_ms if least is not None else 0.0
    if least is None:
        return -reverse.shift_ms
    waits = least.wait_ms + reverse.wait_ms
    weight = least.wait_ms / waits if waits else 0.5
    return weight * least.shift_ms - (1.0 - weight) * reverse.shift_ms


def needs(action: Action, num_stages: int) -> Iterator[Action]:
    """What ``action`` needs from the neighbouring stages."""
    if action.kind is ActionKind.F and action.stage > 0:
        yield Action(action.stage - 1, ActionKind.F, action.microbatch)
    if action.kind in (ActionKind.I, ActionKind.B) and action.stage + 1 < num_stages:
        yield Action(action.stage + 1, ActionKind.I, action.microbatch)
        yield Action(action.stage + 1, ActionKind.B, action.microbatch)
