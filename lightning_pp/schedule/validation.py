"""Check that a schedule can be run, and say exactly where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.notation import CsvTable
from lightning_pp.schedule.program.picture import picture
from lightning_pp.schedule.program.program import Programs
from lightning_pp.schedule.program.whole_batch import late_forward
from lightning_pp.schedule.rules import keeps_rules
from lightning_pp.schedule.simulation.costs import UNIT_COSTS, StageCosts
from lightning_pp.schedule.simulation.engine import CostTables, encode, execute
from lightning_pp.schedule.simulation.memory import exceeds, held_after_each

_F, _I, _W, _B = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B


def check_program(
    schedule: Programs,
    costs: StageCosts,
    memory_limit: float | Sequence[float] | None,
    *,
    source: CsvTable | None = None,
) -> None:
    """All checks of ``Schedule.validate``; ``source`` makes errors point into the file that was read."""
    limits = limit_of_each_rank(memory_limit, schedule.placement.num_ranks)
    if not keeps_rules(schedule, costs, limits):
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
            f"memory_limit has {len(limits)} numbers for {num_ranks} ranks: give one number, or one a rank"
        )
    return limits


class _Checker:
    """The checks of one schedule, in the order in which their errors make sense."""

    def __init__(self, schedule: Programs, source: CsvTable | None) -> None:
        self.schedule = schedule
        self.source = source

    def check(self, costs: StageCosts, limits: tuple[float, ...] | None) -> None:
        if self.schedule.num_microbatches < 1:
            raise ScheduleError(f"num_microbatches is {self.schedule.num_microbatches}: a step has at least 1")
        if len(self.schedule.programs) != self.schedule.placement.num_ranks:
            raise ScheduleError(
                f"{self.schedule.name} has programs for {len(self.schedule.programs)} ranks, "
                f"its placement has {self.schedule.placement.num_ranks}"
            )
        for rank in range(self.schedule.placement.num_ranks):
            cell_of = self._check_cells(rank)
            self._check_complete(rank, cell_of)
            self._check_order(rank, cell_of)
            if self.schedule.whole_batch_loss:
                self._check_forwards_first(rank)
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

    def _check_cells(self, rank: int) -> dict[Action, int]:
        """Each action alone: right rank, known microbatch, not doubled. Returns the cell of each action."""
        placement, m = self.schedule.placement, self.schedule.num_microbatches
        cell_of: dict[Action, int] = {}
        for cell, action in enumerate(self.schedule.programs[rank]):
            if not 0 <= action.stage < placement.num_stages:
                self._fail(
                    f"{action} is of stage {action.stage}, but there are {placement.num_stages} stages", rank, cell
                )
            if placement.rank_of_stage[action.stage] != rank:
                self._fail(
                    f"{action} is misplaced: stage {action.stage} is on rank {placement.rank_of_stage[action.stage]}",
                    rank,
                    cell,
                )
            if not action.kind.is_compute:
                if action.microbatch is not None:
                    self._fail(f"{action} has a microbatch, but {action.kind} concerns all of them", rank, cell)
                continue
            if action.microbatch is None or not 0 <= action.microbatch < m:
                self._fail(f"{action} is of microbatch {action.microbatch}, but there are {m} microbatches", rank, cell)
            if action in cell_of:
                self._fail(f"{action} is doubled: it stands in cell {cell_of[action]} already", rank, cell)
            cell_of[action] = cell
        return cell_of

    def _check_complete(self, rank: int, cell_of: dict[Action, int]) -> None:
        """Every F; and for each, B or else I and W, unless the whole schedule is forward-only."""
        for stage in self.schedule.placement.stages_of_rank(rank):
            for microbatch in range(self.schedule.num_microbatches):
                forward, backward_input, weight, full = (Action(stage, kind, microbatch) for kind in (_F, _I, _W, _B))
                end = len(self.schedule.programs[rank])
                if forward not in cell_of:
                    later = [cell_of[action] for action in (backward_input, weight, full) if action in cell_of]
                    self._fail(f"{forward} is missing", rank, min(later, default=end))
                if self.schedule.forward_only:
                    continue
                if full in cell_of:
                    for half in (backward_input, weight):
                        if half in cell_of:
                            self._fail(
                                f"{half} is doubled: {full} in cell {cell_of[full]} includes it", rank, cell_of[half]
                            )
                elif backward_input not in cell_of:
                    self._fail(
                        f"{backward_input} (or {full}) is missing", rank, cell_of.get(weight, cell_of[forward] + 1)
                    )
                elif weight not in cell_of:
                    self._fail(f"{weight} is missing: {backward_input} needs it later", rank, end)

    def _check_order(self, rank: int, cell_of: dict[Action, int]) -> None:
        """What an action needs of its own rank stands before it."""
        placement = self.schedule.placement
        for action, cell in cell_of.items():
            stage, microbatch = action.stage, action.microbatch
            if action.kind is _F:
                needed = [Action(stage - 1, _F, microbatch)]
            elif action.kind is _W:
                needed = [Action(stage, _I, microbatch)]
            else:
                needed = [Action(stage, _F, microbatch), *(Action(stage + 1, kind, microbatch) for kind in (_I, _B))]
            for other in needed:
                if not 0 <= other.stage < placement.num_stages or placement.rank_of_stage[other.stage] != rank:
                    continue
                if cell_of.get(other, -1) > cell:
                    self._fail(
                        f"{action} is misplaced: it needs {other}, which comes only in cell {cell_of[other]}",
                        rank,
                        cell,
                    )

    def _check_forwards_first(self, rank: int) -> None:
        """No F after a backward, where the loss needs all forwards."""
        program = self.schedule.programs[rank]
        cell = late_forward(program)
        if cell is not None:
            before = next(action for action in program if action.kind in (_I, _W, _B))
            self._fail(
                f"{program[cell]} comes after {before}, but with whole_batch_loss every backward needs the forwards of "
                "all microbatches: put all F of a rank before its I, W and B (Schedule.with_whole_batch_loss() does)",
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
                    self._fail(f"{action} is doubled: it stands in cell {reduced[action.stage]} already", rank, cell)
                reduced[action.stage] = cell
            elif action.kind is not _F and action.stage in reduced:
                self._fail(
                    f"{action} comes after the gradients of stage {action.stage} were reduced in cell "
                    f"{reduced[action.stage]}",
                    rank,
                    cell,
                )
            elif action.kind is not _W and gathers and action.stage not in gathered:
                self._fail(f"{action} uses stage {action.stage}, which is not gathered: UNSHARD it before", rank, cell)

    def _check_deadlock(self) -> None:
        """Run it; what is left shows who waits for whom."""
        schedule = self.schedule
        placement = schedule.placement
        run = execute(encode(schedule), CostTables.build(placement, UNIT_COSTS), placement, schedule.num_microbatches)
        stuck = {
            rank: len(starts)
            for rank, (starts, program) in enumerate(zip(run.start, schedule.programs, strict=True))
            if len(starts) < len(program)
        }
        if not stuck:
            return
        waits = []
        for rank, cell in stuck.items():
            action = schedule.programs[rank][cell]
            step = -1 if action.kind is _F else 1
            sender = placement.rank_of_stage[action.stage + step]
            what = f"{action.stage + step}{'F' if step < 0 else 'I or B'}{action.microbatch}"
            waits.append(f"rank {rank} before {action} (cell {cell}) waits for {what} of rank {sender}")
        rank, cell = next(iter(stuck.items()))
        self._fail("deadlock: " + "; ".join(waits), rank, cell)

    def _check_memory(self, costs: StageCosts, limits: Sequence[float]) -> None:
        """No rank holds more than its limit."""
        num_stages = self.schedule.placement.num_stages
        for rank, (program, limit) in enumerate(zip(self.schedule.programs, limits, strict=True)):
            held = list(held_after_each(program, costs, num_stages))
            for cell, amount in enumerate(held):
                if exceeds(amount, limit):
                    self._fail(
                        f"after {program[cell]} the rank holds {amount:g}, its memory limit is {limit:g}; "
                        f"this schedule needs {max(held):g}",
                        rank,
                        cell,
                    )
