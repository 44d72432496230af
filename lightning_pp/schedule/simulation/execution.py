"""The simulator: the times of all actions of a step, on arrays.

Which action waits for which is the same whatever they cost. So the *turns*, in each of which every rank that can takes
its next action, are found once for a schedule. Then the times of a turn are computed together, for one set of costs or
for many at once. Codes and rows are those of :mod:`lightning_pp.schedule.program.coded`.

An action starts when its rank is free, what it needs of another rank has arrived, and its stage is gathered. Gathers
and reductions run one after the other beside the computation of their rank. A program without UNSHARD gathers each
stage once, from where its rank begins in the order of first use; one without REDUCE reduces each stage once, after its
last W or B.

OFFLOAD is the copy of what F has saved: it starts when that F and the OFFLOAD before have ended, and what follows it in
the program waits for its end. RELOAD starts when what precedes it has ended, the RELOAD before included, and the I or B
of its microbatch waits for its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_pp.schedule.program.coded import OFFLOAD, REDUCE, RELOAD, UNSHARD, B, Codes, F, I, W
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.simulation.costs import StageCosts

if TYPE_CHECKING:
    from lightning_pp.schedule.schedule import Schedule

Times: TypeAlias = npt.NDArray[np.float64]
Slots: TypeAlias = npt.NDArray[np.int32]
"""Places in arrays of times."""

_NOTHING, _LAST_FORWARD = -1, -2
_LONG_AGO = -np.inf


@dataclass(frozen=True)
class CostTables:
    """Costs by row; the last dimension, if there is one, has many costs at once.

    Attributes:
        duration: Milliseconds of the action. Shape (9 * number of stages) or (9 * number of stages, number of costs).
        latency: Milliseconds from the end of the action that it needs to its arrival. Shape (9 * number of stages) or
            (9 * number of stages, 1).
    """

    duration: Times
    latency: Times

    @classmethod
    def build(cls, placement: Placement, costs: StageCosts) -> CostTables:
        """Tables for one placement; raises ScheduleError if the costs are for another number of stages."""
        resolved = costs.per_stage(placement.num_stages)
        forward, backward_input, backward_weight = map(
            np.array, (resolved.forward, resolved.backward_input, resolved.backward_weight)
        )
        full = backward_input + backward_weight
        nothing = np.zeros(placement.num_stages)
        rank = np.array(placement.rank_of_stage)
        is_sent = rank[1:] != rank[:-1]
        there = np.append(0.0, np.where(is_sent, resolved.p2p[:-1], 0.0))
        back = np.append(np.where(is_sent, resolved.p2p_back[1:], 0.0), 0.0)
        beside = (resolved.offload, resolved.offload, resolved.gather, nothing, resolved.reduce)
        return cls(
            duration=np.concatenate((forward, backward_input, backward_weight, full, *beside)),
            latency=np.concatenate((there, back, nothing, back, *[nothing] * 5)),
        )


@dataclass(frozen=True)
class Run:
    """Times of one execution, milliseconds.

    Attributes:
        execution: What was run.
        tables: Its costs.
        start: By slot, when the action starts. Shape (number of actions that ran) or (that, number of costs).
        end: By slot, when it ends; of the same shape.
        begin: For each rank, when it begins.
    """

    execution: Execution
    tables: CostTables
    start: Times
    end: Times
    begin: Times

    @cached_property
    def ended(self) -> tuple[float, ...]:
        """For each rank, when all has ended that it does, reductions included."""
        slots = self.execution.slots
        ended = [float(self.end[own].max(initial=begin)) for begin, own in zip(self.begin, slots, strict=True)]
        return tuple(map(max, ended, self._reductions_ended()))

    @property
    def makespan(self) -> float:
        """When everything has ended."""
        return max(self.ended)

    def spans(self) -> Times:
        """For each rank, from the start of its first to the end of its last F, I, W or B; 0 if it has none."""
        spans = np.zeros((len(self.execution.slots), *self.end.shape[1:]))
        for rank, slots in enumerate(self.execution.computing()):
            if len(slots):
                spans[rank] = self.end[slots[-1]] - self.start[slots[0]]
        return spans

    def _reductions_ended(self) -> list[float]:
        """For each rank whose program does not say when to reduce, when its last reduction ends; else 0."""
        n = self.execution.num_stages
        reduce_ms = self.tables.duration[REDUCE * n :]
        found = [0.0] * len(self.execution.slots)
        if not reduce_ms.any():
            return found
        for rank, slots in enumerate(self.execution.slots):
            kinds, stages = np.divmod(self.execution.rows[slots], n)
            if (kinds == REDUCE).any():
                continue
            ends_gradients = (kinds == W) | (kinds == B)
            last = np.full(n, _LONG_AGO)
            np.maximum.at(last, stages[ends_gradients], self.end[slots[ends_gradients]])
            for stage in np.argsort(last, kind="stable"):
                if last[stage] > _LONG_AGO:
                    found[rank] = max(found[rank], float(last[stage])) + float(reduce_ms[stage])
        return found


class Execution:
    """The turns of a schedule, as far as its ranks get.

    A *slot* is the place of an action in arrays of times, by turn. After those of the actions come the slots of what an
    action waits for at first: for each rank when it begins, for each stage when it is gathered, for each rank when its
    collectives begin, and one for nothing.

    Attributes:
        num_stages: Stages of the model.
        slots: For each rank, the slots of its actions in the order of its program; fewer than it has actions if it
            waits for ever.
        rows: By slot, the row of the action.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_stages = schedule.placement.num_stages
        self._num_ranks = schedule.placement.num_ranks
        programs = [program.codes for program in schedule.coded]
        waits = _Waits(programs, schedule)
        turns, num_run = waits.turns()
        order = np.concatenate(turns) if turns else np.empty(0, dtype=np.int32)
        bounds = np.cumsum([0, *map(len, turns)]).tolist()
        self._turns = [slice(first, last) for first, last in pairwise(bounds)]
        self.rows = waits.rows[order]
        slot = np.empty(waits.num_places + waits.num_initial, dtype=np.int32)
        slot[order] = np.arange(len(order))
        slot[waits.num_places :] = len(order) + np.arange(waits.num_initial)
        self._previous, self._needed = slot[waits.previous[order]], slot[waits.needed[order]]
        self._gathered = None if waits.gathered is None else slot[waits.gathered[order]]
        self._copied = [slot[places[order]] for places in waits.copied]
        self._stage_slots = slot[waits.num_places + self._num_ranks :][: self.num_stages]
        self.slots = [slot[first : first + number] for first, number in zip(waits.first, num_run, strict=True)]

    def computing(self) -> list[Slots]:
        """For each rank, the slots of its F, I, W and B."""
        if not (self.rows >= OFFLOAD * self.num_stages).any():
            return self.slots
        return [slots[self.rows[slots] < OFFLOAD * self.num_stages] for slots in self.slots]

    def run(self, tables: CostTables, begin_ms: Sequence[float] | None = None) -> Run:
        """The times of all actions that run, each rank beginning at its ``begin_ms``, at 0 by default."""
        num_actions = len(self.rows)
        duration, latency = tables.duration[self.rows], tables.latency[self.rows]
        begin_at = np.zeros(self._num_ranks) if begin_ms is None else np.array(begin_ms, dtype=np.float64)
        initial = self._initial(tables, begin_at)
        start = np.empty((num_actions, *duration.shape[1:]))
        end = np.empty((num_actions + len(initial), *duration.shape[1:]))
        end[num_actions:].T[...] = initial
        gathered = self._gathered
        if gathered is None and tables.duration[UNSHARD * self.num_stages : (UNSHARD + 1) * self.num_stages].any():
            gathered = self._stage_slots[self.rows % self.num_stages]
        has_latency = bool(latency.any())
        for here in self._turns:
            begin = start[here]
            np.take(end, self._needed[here], axis=0, out=begin, mode="clip")  # any other mode takes a copy
            if has_latency:
                begin += latency[here]
            np.maximum(begin, end[self._previous[here]], out=begin)
            if gathered is not None:
                np.maximum(begin, end[gathered[here]], out=begin)
            for copied in self._copied:
                np.maximum(begin, end[copied[here]], out=begin)
            np.add(begin, duration[here], out=end[here])
        return Run(self, tables, start, end[:num_actions], begin_at)

    def latest(self, run: Run) -> tuple[Times, Times]:
        """By slot, when each action of ``run`` may start and end at the latest, so that no rank ends later."""
        duration, latency = run.tables.duration[self.rows], run.tables.latency[self.rows]
        end = np.full(len(self.rows) + 2 * self._num_ranks + self.num_stages + 2, np.inf)
        for slots, ended in zip(self.slots, run.ended, strict=True):
            end[slots[-1:]] = ended
        for here in reversed(self._turns):
            start = end[: len(self.rows)][here] - duration[here]
            np.minimum.at(end, self._previous[here], start)
            np.minimum.at(end, self._needed[here], start - latency[here])
        return end[: len(self.rows)] - duration, end[: len(self.rows)]

    def _initial(self, tables: CostTables, begin: Times) -> Times:
        """The times of the slots after those of the actions."""
        n = self.num_stages
        gathered = np.full(n, _LONG_AGO)
        collectives = np.full(self._num_ranks, _LONG_AGO)
        gather_ms = tables.duration[UNSHARD * n : (UNSHARD + 1) * n]
        for rank, slots in enumerate(self.slots) if gather_ms.any() else ():
            kinds, stages = np.divmod(self.rows[slots], n)
            if (kinds == UNSHARD).any():
                continue
            used, first = np.unique(stages, return_index=True)
            in_turn = used[np.argsort(first)]
            gathered[in_turn] = begin[rank] + np.cumsum(gather_ms[in_turn])
            collectives[rank] = gathered[in_turn].max(initial=_LONG_AGO)
        return np.concatenate((begin, gathered, collectives, [_LONG_AGO, _LONG_AGO]))


class _Waits:
    """What each action waits for, by *place*: all ranks one after the other, each with a place at its end.

    Attributes:
        first: For each rank, the place of its first action.
        rows: By place, the row of the action.
        previous: By place, that of the action before on the rank that computes.
        needed: By place, that of the action whose result it needs; for UNSHARD and REDUCE the collective before.
        gathered: By place, that of the UNSHARD of its stage; None if there is no UNSHARD.
        copied: By place, that of the latest OFFLOAD; and of the RELOAD of its microbatch, or before that RELOAD. Empty
            if nothing is offloaded.
        num_places: How many places actions have; after them come those of what is there at first.
        num_initial: How many those are.
    """

    def __init__(self, programs: Sequence[npt.NDArray[np.int64]], schedule: Schedule) -> None:
        n, m, num_ranks = schedule.placement.num_stages, schedule.num_microbatches, schedule.placement.num_ranks
        self._programs, self._num_stages = programs, n
        ends = np.cumsum([len(program) + 1 for program in programs])
        self.first = [0, *ends[:-1].tolist()]
        self.num_places, self.num_initial = int(ends[-1]), 2 * num_ranks + n + 2
        self._always = self.num_places + self.num_initial - 2
        never = self._always + 1
        needs, published_in = _needs(n, whole_batch_loss=schedule.whole_batch_loss)
        place_of = np.full(3 * n * m, never, dtype=np.int32)
        self.rows = np.full(self.num_places, -1, dtype=np.int32)
        for first, program in zip(self.first, programs, strict=True):
            rows = self.rows[first : first + len(program)]
            rows[:] = program // m
            computes = np.flatnonzero(rows < OFFLOAD * n)
            place_of[program[computes] + (published_in[rows[computes]] - rows[computes]) * m] = first + computes
        last_forward = np.flatnonzero(self.rows == F * n + n - 1).max(initial=-1)
        self.previous = np.arange(-1, self.num_places - 1, dtype=np.int32)
        self.previous[self.first] = self.num_places + np.arange(num_ranks)
        self.needed = np.full(self.num_places, never, dtype=np.int32)
        self.gathered: Slots | None = None
        self.copied: tuple[Slots, ...] = ()
        for rank, (first, program) in enumerate(zip(self.first, programs, strict=True)):
            rows = self.rows[first : first + len(program)]
            needed = needs[rows]
            found = place_of.take(needed * m + (program - rows * np.int64(m)), mode="clip")
            found[needed == _NOTHING] = self._always
            found[needed == _LAST_FORWARD] = last_forward if last_forward >= 0 else never
            self.needed[first : first + len(program)] = found
            kinds = rows // n
            if (kinds >= OFFLOAD).any():
                self.previous[first : first + len(rows)] = _latest_before(
                    kinds < OFFLOAD, first, self.num_places + rank
                )
            if (kinds >= UNSHARD).any():
                self._add_collectives(rank, first, rows)
            if ((kinds == OFFLOAD) | (kinds == RELOAD)).any():
                self._add_copies(rank, first, program - kinds * np.int64(n * m), kinds)

    def _add_collectives(self, rank: int, first: int, rows: Slots) -> None:
        """What the actions of a rank with sharding actions wait for."""
        kinds, stages = np.divmod(rows, self._num_stages)
        here = slice(first, first + len(rows))
        num_ranks = len(self._programs)
        is_collective = (kinds == UNSHARD) | (kinds == REDUCE)
        begin = self.num_places + num_ranks + self._num_stages + rank
        collective = _latest_before(is_collective, first, begin)
        self.needed[here][is_collective] = collective[is_collective]
        if self.gathered is None:
            self.gathered = np.full(self.num_places, self._always, dtype=np.int32)
            for other, program in zip(self.first, self._programs, strict=True):
                of_other = slice(other, other + len(program))
                self.gathered[of_other] = self.num_places + num_ranks + self.rows[of_other] % self._num_stages
        for stage in np.unique(stages):
            latest = _latest_before((kinds == UNSHARD) & (stages == stage), first, self.num_places + num_ranks + stage)
            self.gathered[here][stages == stage] = latest[stages == stage]
        self.gathered[here][kinds >= OFFLOAD] = self._always

    def _add_copies(self, rank: int, first: int, microbatches: Codes, kinds: Slots) -> None:
        """What the actions of a rank with copies wait for; ``microbatches`` are numbered over all stages."""
        here, begin = slice(first, first + len(kinds)), self.num_places + rank
        if not self.copied:
            self.copied = tuple(np.full(self.num_places, self._always, dtype=np.int32) for _ in range(2))
        is_out, is_back, ends = kinds == OFFLOAD, kinds == RELOAD, (kinds == I) | (kinds == B)
        latest = _latest_before(is_out, first, begin)
        self.previous[here][is_out] = latest[is_out]
        self.copied[0][here][~is_out] = latest[~is_out]
        self.copied[1][here][is_back] = _latest_before(is_back, first, begin)[is_back]
        reload_of = np.full(microbatches.max() + 1, self._always, dtype=np.int32)
        reload_of[microbatches[is_back]] = first + np.flatnonzero(is_back)
        self.copied[1][here][ends] = reload_of[microbatches[ends]]

    def turns(self) -> tuple[list[Slots], list[int]]:
        """The places of each turn, and for each rank how many of its actions run."""
        has_ended = np.zeros(self.num_places + self.num_initial, dtype=bool)
        has_ended[self.num_places : -1] = True
        at = np.array(self.first, dtype=np.int32)
        turns = []
        while len(ranks := np.flatnonzero(has_ended[self.needed[at]])):
            here = at[ranks]
            turns.append(here)
            has_ended[here] = True
            at[ranks] = here + 1
        return turns, (at - self.first).tolist()


def _latest_before(is_meant: npt.NDArray[np.bool_], first: int, default: int) -> Slots:
    """For each action of a rank, the place of the latest one before it that is meant; else ``default``."""
    places = np.where(is_meant, np.arange(first, first + len(is_meant)), -1)
    latest = np.concatenate(([-1], np.maximum.accumulate(places)[:-1]))
    return np.where(latest >= 0, latest, default).astype(np.int32)


def _needs(n: int, *, whole_batch_loss: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """By row, the row whose result is needed, and the row in which the own result is known: B is known in that of I."""
    rows = np.arange(9 * n)
    needs = np.full(9 * n, _NOTHING)
    needs[OFFLOAD * n : OFFLOAD * n + n] = rows[F * n : F * n + n]
    needs[F * n + 1 : F * n + n] = rows[F * n : F * n + n - 1]
    for kind in (I, B):
        needs[kind * n : kind * n + n - 1] = rows[I * n + 1 : I * n + n]
        needs[kind * n + n - 1] = _LAST_FORWARD if whole_batch_loss else _NOTHING
    rows[B * n : B * n + n] = rows[I * n : I * n + n]
    return needs, rows
