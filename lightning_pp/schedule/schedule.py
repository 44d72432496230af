"""A schedule: the ordered actions of every rank for one step; checked, simulated, read and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from lightning_pp.schedule.program.action import Action
from lightning_pp.schedule.program.coded import OFFLOAD, B, CodedProgram, I, W
from lightning_pp.schedule.program.notation import csv_text, read_csv
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.program.whole_batch import forwards_first, late_forward
from lightning_pp.schedule.simulation.costs import UNIT_COSTS, StageCosts
from lightning_pp.schedule.simulation.execution import Execution
from lightning_pp.schedule.simulation.simulate import Simulation, simulate, time_in_a_row
from lightning_pp.schedule.validation import check_program


@dataclass(frozen=True)
class Schedule:
    """The programs of all ranks for one step of ``num_microbatches`` microbatches.

    Attributes:
        name: Name of the family that made it, or of the file it was read from.
        placement: Which rank holds which stages.
        num_microbatches: Number of microbatches of a step, ``m`` in formulas.
        programs: For each rank, its actions in the order in which it runs them: a tuple, or a
            :class:`~lightning_pp.schedule.program.coded.CodedProgram`.
        whole_batch_loss: Whether the last stage starts no backward before its last forward, since the loss needs the
            whole batch (:mod:`lightning_pp.schedule.program.whole_batch`).
        offload_shares: For each rank, the share of ``held_on_host`` that its OFFLOAD moves; empty: all.
    """

    name: str
    placement: Placement
    num_microbatches: int
    programs: tuple[Sequence[Action], ...]
    whole_batch_loss: bool = False
    offload_shares: tuple[float, ...] = ()

    def priced(self, costs: StageCosts) -> StageCosts:
        """``costs``, with what its OFFLOAD and RELOAD take and move."""
        if not self.offload_shares:
            return costs
        return costs.with_share([self.offload_shares[rank] for rank in self.placement.rank_of_stage])

    @property
    def coded(self) -> tuple[CodedProgram, ...]:
        """The programs as codes; their stages and microbatches are within the sizes of the schedule."""
        sizes = self.placement.num_stages, self.num_microbatches
        return tuple(CodedProgram.of(program, *sizes) for program in self.programs)

    @cached_property
    def execution(self) -> Execution:
        """The order in which its actions can run, whatever they cost; found once."""
        return Execution(self)

    def __getstate__(self) -> dict[str, Any]:
        """Its fields alone: what was found of it is found again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def splits_backward(self) -> bool:
        """True when some backward is split into I and W."""
        return self._has_kind(I)

    @cached_property
    def forward_only(self) -> bool:
        """True when there is no backward at all, as in evaluation."""
        return not self._has_kind(I, W, B)

    @cached_property
    def offloads(self) -> bool:
        """True when something waits on the host for its backward."""
        return self._has_kind(OFFLOAD)

    def _has_kind(self, *kinds: int) -> bool:
        return any(bool(np.isin(program.parts()[0], kinds).any()) for program in self.coded)

    def validate(
        self, *, costs: StageCosts | None = None, memory_limit: float | Sequence[float] | None = None
    ) -> Schedule:
        """Check that the schedule can be run, and return it.

        Every stage and microbatch has its F once and, unless the schedule is forward-only, either B or I and W, on
        the rank that holds the stage; what an action needs comes before it; where a rank's program says when to gather,
        a stage is gathered when it is used; gradients are reduced after the last of them, and once; with
        ``whole_batch_loss`` all F of a rank come before its backwards; the ranks do not wait for each other in a
        circle, given receives that block and sends that do not; no rank holds more than the limit.

        Args:
            costs: Gives ``held_after_forward`` and ``held_after_input``; by default every microbatch holds 1 until W.
            memory_limit: The most that a rank may hold, in the unit of ``costs.held_*``: a number for all ranks or
                one per rank; None for no limit.

        Raises:
            ScheduleError: With the failing cell and a picture of the rows around it.
        """
        check_program(self, costs or UNIT_COSTS, memory_limit)
        return self

    def with_whole_batch_loss(self) -> Schedule:
        """This schedule for a step whose loss needs the whole batch: on each rank its F first, then its I, W and B.

        Both parts keep their order. No other order of F and backward can run, and this one always can
        (:mod:`lightning_pp.schedule.program.whole_batch`). Sharding actions are left out of a schedule that has to
        change: put them in afterwards, with :func:`~lightning_pp.schedule.sharding.insert_sharding`.
        """
        if all(late_forward(program) is None for program in self.coded):
            return replace(self, whole_batch_loss=True)
        programs = tuple(map(forwards_first, self.coded))
        return replace(self, programs=programs, whole_batch_loss=True)

    def simulate(self, costs: StageCosts | None = None) -> Simulation:
        """Run the schedule against ``costs`` (default: F, I and W of 1 ms) without a model.

        With ``whole_batch_loss`` the backwards of the last stage wait for its last forward. What the code after the
        last unit takes is spread over the F and I of the last stage, as their costs have it, though it runs in one go.

        Raises:
            ScheduleError: The costs are for another number of stages, or the schedule deadlocks.
        """
        return simulate(self, costs or UNIT_COSTS)

    def time_in_a_row(self, costs: StageCosts | None = None) -> float:
        """Milliseconds from a step to the next, in a row of steps in which each rank begins the next when it is done.

        Steps are like that where nothing is clipped by norm or
        skipped. Without gathers and reductions it is at most the longest span of a step alone: begun so much later on
        each rank, a step meets nothing of the one before.

        Args:
            costs: As in :meth:`simulate`.

        Raises:
            ScheduleError: As there.
        """
        return time_in_a_row(self, costs or UNIT_COSTS)

    def csv_text(self, *, with_waits: bool = False) -> str:
        """The programs in torch's CSV notation: a row a rank, a cell an action.

        Args:
            with_waits: Write a ``WAIT_REDUCE_GRAD`` after each ``REDUCE_GRAD``. torch 2.15 asks for it, and earlier
                versions do not know it.
        """
        return csv_text(self.programs, with_waits=with_waits)

    def to_csv(self, path: str | PathLike[str], *, with_waits: bool = False) -> None:
        """Write :meth:`csv_text` to ``path``; ``_PipelineScheduleRuntime._load_csv`` of torch reads it."""
        Path(path).write_text(self.csv_text(with_waits=with_waits), encoding="utf-8", newline="")

    @classmethod
    def from_csv(
        cls,
        path: str | PathLike[str],
        *,
        num_ranks: int | None = None,
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        name: str | None = None,
    ) -> Schedule:
        """Read a schedule from torch's CSV notation and check it.

        The placement follows from the stages that each row names. Empty cells and torch's SEND and RECV cells are
        skipped (transfers follow from the order), and ``(0F1;3B0)OVERLAP_F_B`` is read as its parts in their order.

        Args:
            path: The file.
            num_ranks: Refuse a file with another number of rows.
            num_stages: Refuse a file with another number of stages.
            num_microbatches: Refuse a file with another number of microbatches; by default the highest one it names.
            name: Name of the schedule; by default that of the file.

        Raises:
            ScheduleError: The file is missing or malformed, has other sizes, or its programs fail :meth:`validate`.
        """
        table = read_csv(Path(path))
        table.check_sizes(num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches)
        number = num_microbatches or table.num_microbatches
        schedule = cls(name or str(path), table.placement, number, table.coded_programs(number))
        check_program(schedule, UNIT_COSTS, None, source=table)
        return schedule
