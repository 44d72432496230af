"""Check that a schedule can be run, and name the cell where it cannot; takes a second for a million actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.program.action import USES_PARAMETERS, Action, ActionKind
from lightning_pp.schedule.program.coded import (
    INDEX_OF_KIND,
    KIND_OF_INDEX,
    OFFLOAD,
    RELOAD,
    UNSHARD,
    B,
    CodedProgram,
    Codes,
    F,
    I,
    W,
)
from lightning_pp.schedule.program.notation import CsvTable
from lightning_pp.schedule.program.picture import picture
from lightning_pp.schedule.program.whole_batch import late_forward
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.memory import exceeds, held_after_each

if TYPE_CHECKING:
    from lightning_pp.schedule.schedule import Schedule


def check_program(
    schedule: Schedule,
    costs: StageCosts,
    memory_limit: float | Sequence[float] | None,
    *,
    source: CsvTable | None = None,
) -> None:
    """All checks of ``Schedule.validate``; ``source`` makes errors point into the file that was read."""
    limits = limit_of_each_rank(memory_limit, schedule.placement.num_ranks)
    _Checker(schedule, source).check(costs, limits)


def limit_of_each_rank(memory_limit: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...] | None:
    """``memory_limit`` as one number per rank, or None for no limit.

    Raises:
        ScheduleError: There are numbers for another number of ranks.
    """
    if memory_limit is None:
        return None
    if isinstance(memory_limit, (int, float)):
        return (float(memory_limit),) * num_ranks
    limits = tuple(map(float, memory_limit))
    if len(limits) != num_ranks:
        raise ScheduleError(
            f"memory_limit has {len(limits)} numbers for {num_ranks} ranks: give one number, or one per rank"
        )
    return limits


class _Checker:
    """The checks of one schedule, in the order in which their errors make sense."""

    def __init__(self, schedule: Schedule, source: CsvTable | None) -> None:
        self.schedule = schedule
        self.source = source

    def check(self, costs: StageCosts, limits: tuple[float, ...] | None) -> None:
        schedule = self.schedule
        if schedule.num_microbatches < 1:
            raise ScheduleError(f"num_microbatches is {schedule.num_microbatches}: a step has at least 1")
        if len(schedule.programs) != schedule.placement.num_ranks:
            raise ScheduleError(
                f"{schedule.name} has programs for {len(schedule.programs)} ranks, "
                f"its placement has {schedule.placement.num_ranks}"
            )
        parts = list(map(_parts, schedule.programs))
        forward_only = not any((np.isin(kinds, (I, W, B))).any() for kinds, _, _ in parts)
        for rank, (kinds, stages, microbatches) in enumerate(parts):
            cells = self._check_cells(rank, kinds, stages, microbatches)
            self._check_complete(rank, cells, forward_only=forward_only)
            self._check_order(rank, cells)
            if schedule.whole_batch_loss:
                self._check_forwards_first(rank)
            if (kinds >= UNSHARD).any():
                self._check_sharding(rank)
        self._check_deadlock()
        if limits is not None:
            self._check_memory(costs, limits)

    def _fail(self, message: str, rank: int, cell: int) -> NoReturn:
        """Raise with a picture around action ``cell`` of ``rank``; one past the last action is its end."""
        if self.source is None:
            rows: Sequence[Sequence[str]] = [tuple(map(str, program)) for program in self.schedule.programs]
            where, column = self.schedule.name, cell
        else:
            columns = self.source.columns[rank]
            rows, where = self.source.cells, str(self.source.path)
            column = columns[cell] if cell < len(columns) else len(rows[rank])
        raise ScheduleError(f"{where}, rank {rank}, cell {column}: {message}\n{picture(rows, rank, column)}")

    def _check_cells(self, rank: int, kinds: Codes, stages: Codes, microbatches: Codes) -> Codes:
        """Each action alone: right rank, known microbatch, not doubled.

        Returns:
            The cell of each F, I, W, B, OFFLOAD and RELOAD of the rank, -1 for none. Shape (6, stages of the rank,
            microbatches).
        """
        placement, m = self.schedule.placement, self.schedule.num_microbatches
        n = placement.num_stages
        is_unknown = (stages < 0) | (stages >= n)
        is_elsewhere = np.array(placement.rank_of_stage)[stages.clip(0, n - 1)] != rank
        is_late = np.where(kinds < UNSHARD, (microbatches < 0) | (microbatches >= m), microbatches != -1)
        wrong = np.flatnonzero(is_unknown | is_elsewhere | is_late)
        cell = int(wrong[0]) if len(wrong) else len(kinds)
        computes = np.flatnonzero(kinds[:cell] < UNSHARD)
        own = placement.stages_of_rank(rank)
        cells = np.full((6, len(own), m), -1)
        cells[kinds[computes], np.searchsorted(own, stages[computes]), microbatches[computes]] = computes
        if np.count_nonzero(cells >= 0) < len(computes):
            self._fail_doubled(rank, computes)
        if not len(wrong):
            return cells
        action = self.schedule.programs[rank][cell]
        if is_unknown[cell]:
            self._fail(f"{action} is of stage {action.stage}, but there are {n} stages", rank, cell)
        if is_elsewhere[cell]:
            other = placement.rank_of_stage[action.stage]
            self._fail(f"{action} is misplaced: stage {action.stage} is on rank {other}", rank, cell)
        if action.kind.has_microbatch:
            self._fail(f"{action} is of microbatch {action.microbatch}, but there are {m} microbatches", rank, cell)
        self._fail(f"{action} names a microbatch, but {action.kind} applies to all of them", rank, cell)

    def _fail_doubled(self, rank: int, cells: Codes) -> None:
        """Name the first action of ``cells`` that stands in an earlier one, too."""
        seen: dict[Action, int] = {}
        for cell in cells.tolist():
            action = self.schedule.programs[rank][cell]
            if action in seen:
                self._fail(f"{action} is repeated: cell {seen[action]} already has it", rank, cell)
            seen[action] = cell

    def _check_complete(self, rank: int, cells: Codes, *, forward_only: bool) -> None:
        """Every F; and for each, B or else I and W, unless the whole schedule is forward-only; RELOAD with OFFLOAD."""
        forward, backward_input, weight, full, offload, reload = cells
        alone = (offload >= 0) != (reload >= 0)
        if alone.any():
            cell = int(np.maximum(offload, reload)[alone].min())
            other = "RELOAD" if self.schedule.programs[rank][cell].kind is ActionKind.OFFLOAD else "OFFLOAD"
            self._fail(f"{self.schedule.programs[rank][cell]} has no {other} of its microbatch", rank, cell)
        is_split = (backward_input >= 0) & (weight >= 0) & (full < 0)
        is_full = (backward_input < 0) & (weight < 0) & (full >= 0)
        wrong = forward < 0 if forward_only else (forward < 0) | ~(is_split | is_full)
        if not wrong.any():
            return
        place, microbatch = np.unravel_index(int(wrong.argmax()), wrong.shape)
        stage, end = self.schedule.placement.stages_of_rank(rank)[int(place)], len(self.schedule.programs[rank])
        names = [str(Action(stage, KIND_OF_INDEX[kind], int(microbatch))) for kind in (F, I, W, B)]
        at_f, at_i, at_w, at_b = cells[:4, place, microbatch].tolist()
        if at_f < 0:
            self._fail(f"{names[F]} is missing", rank, min((at for at in (at_i, at_w, at_b) if at >= 0), default=end))
        if at_b >= 0:
            half, at = (names[I], at_i) if at_i >= 0 else (names[W], at_w)
            self._fail(f"{half} is repeated: {names[B]} in cell {at_b} includes it", rank, at)
        if at_i < 0:
            self._fail(f"{names[I]} (or {names[B]}) is missing", rank, at_w if at_w >= 0 else at_f + 1)
        self._fail(f"{names[W]} is missing: {names[I]} needs it later", rank, end)

    def _check_order(self, rank: int, cells: Codes) -> None:
        """What an action needs of its own rank stands before it."""
        own = self.schedule.placement.stages_of_rank(rank)
        pairs = [((W, place), (I, place)) for place in range(len(own))]
        pairs += [((kind, place), (F, place)) for place in range(len(own)) for kind in (I, B, OFFLOAD)]
        pairs += [((RELOAD, place), (OFFLOAD, place)) for place in range(len(own))]
        pairs += [((kind, place), (RELOAD, place)) for place in range(len(own)) for kind in (I, B)]
        for place in range(len(own) - 1):
            if own[place] + 1 == own[place + 1]:
                pairs.append(((F, place + 1), (F, place)))
                pairs += [((kind, place), (needed, place + 1)) for kind in (I, B) for needed in (I, B)]
        first: tuple[int, int] | None = None
        for action, needed in pairs:
            late = (cells[action] >= 0) & (cells[needed] > cells[action])
            if late.any():
                found = min(zip(cells[action][late].tolist(), cells[needed][late].tolist(), strict=True))
                first = found if first is None else min(first, found)
        if first is not None:
            cell, needed_cell = first
            program = self.schedule.programs[rank]
            self._fail(
                f"{program[cell]} comes too early: it needs {program[needed_cell]}, which is in cell {needed_cell}",
                rank,
                cell,
            )

    def _check_forwards_first(self, rank: int) -> None:
        """No F after a backward, where the loss needs all forwards."""
        program = self.schedule.programs[rank]
        sizes = self.schedule.placement.num_stages, self.schedule.num_microbatches
        cell = late_forward(CodedProgram.of(program, *sizes))
        if cell is not None:
            before = next(action for action in program if action.kind.is_compute and action.kind is not ActionKind.F)
            self._fail(
                f"{program[cell]} comes after {before}, but with whole_batch_loss every backward needs the forwards "
                "of all microbatches. Put all F of a rank before its I, W and B (Schedule.with_whole_batch_loss() "
                "does)",
                rank,
                cell,
            )

    def _check_sharding(self, rank: int) -> None:
        """Gathered when used, where the program says when to gather; reduced once, and last."""
        program = self.schedule.programs[rank]
        gathers = any(action.kind is ActionKind.UNSHARD for action in program)
        gathered: set[int] = set()
        reduced: dict[int, int] = {}
        for cell, action in enumerate(program):
            if action.kind is ActionKind.UNSHARD:
                gathered.add(action.stage)
            elif action.kind is ActionKind.RESHARD:
                gathered.discard(action.stage)
            elif action.kind is ActionKind.REDUCE:
                if action.stage in reduced:
                    self._fail(f"{action} is repeated: cell {reduced[action.stage]} already has it", rank, cell)
                reduced[action.stage] = cell
            elif action.kind is not ActionKind.F and action.stage in reduced:
                self._fail(
                    f"{action} comes after the gradients of stage {action.stage} were reduced in cell "
                    f"{reduced[action.stage]}",
                    rank,
                    cell,
                )
            elif action.kind in USES_PARAMETERS and gathers and action.stage not in gathered:
                self._fail(
                    f"{action} uses stage {action.stage}, which is not gathered. Add UNSHARD before it", rank, cell
                )

    def _check_deadlock(self) -> None:
        """Run it; what is left shows who waits for whom."""
        schedule = self.schedule
        stuck = {
            rank: len(slots)
            for rank, (slots, program) in enumerate(zip(schedule.execution.slots, schedule.programs, strict=True))
            if len(slots) < len(program)
        }
        if not stuck:
            return
        waits = []
        for rank, cell in stuck.items():
            action = schedule.programs[rank][cell]
            step = -1 if action.kind is ActionKind.F else 1
            sender = schedule.placement.rank_of_stage[action.stage + step]
            what = f"{action.stage + step}{'F' if step < 0 else 'I or B'}{action.microbatch}"
            waits.append(f"rank {rank} before {action} (cell {cell}) waits for {what} of rank {sender}")
        rank, cell = next(iter(stuck.items()))
        self._fail("deadlock: " + "; ".join(waits), rank, cell)

    def _check_memory(self, costs: StageCosts, limits: Sequence[float]) -> None:
        """No rank holds more than its limit."""
        num_stages = self.schedule.placement.num_stages
        for rank, (program, limit) in enumerate(zip(self.schedule.programs, limits, strict=True)):
            held = held_after_each(program, self.schedule.priced(costs), num_stages)
            most = float(held.max(initial=0.0))
            if exceeds(most, limit):
                cell = next(cell for cell, amount in enumerate(held.tolist()) if exceeds(amount, limit))
                self._fail(
                    f"the rank holds {held[cell]:g} after {program[cell]}, but its memory limit is {limit:g}. This "
                    f"schedule needs {most:g}",
                    rank,
                    cell,
                )


def _parts(program: Sequence[Action]) -> tuple[Codes, Codes, Codes]:
    """Kinds, stages and microbatches as they were given; microbatch -1 for none."""
    if isinstance(program, CodedProgram):
        kinds, stages, microbatches = program.parts()
        return kinds, stages, np.where(kinds < UNSHARD, microbatches, -1)
    table = [
        (INDEX_OF_KIND[action.kind], action.stage, -1 if action.microbatch is None else action.microbatch)
        for action in program
    ]
    kinds, stages, microbatches = np.array(table, dtype=np.int64).reshape(-1, 3).T
    return kinds, stages, microbatches
