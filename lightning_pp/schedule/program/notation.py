"""Read and write torch's CSV notation of a schedule: a row a rank, a cell an action."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.program.action import Action
from lightning_pp.schedule.program.coded import CodedProgram
from lightning_pp.schedule.program.picture import picture
from lightning_pp.schedule.program.placement import Placement

# what our runtime does by itself: messages, and since torch 2.15 the waits for them and for reductions
_IMPLIED = re.compile(r"\s*\d+(((WAIT_)?SEND|RECV)_[FB]\d+|WAIT_REDUCE_GRAD)\s*")
_OVERLAP = re.compile(r"\s*\(([^()]*)\)OVERLAP_F_B\s*")


def csv_text(programs: Sequence[Sequence[Action]], *, with_waits: bool = False) -> str:
    """The programs as CSV, one row per rank; ``with_waits`` waits after each reduction, as torch 2.15 asks for."""
    rows = (",".join(map(str, program)) + "\n" for program in programs)
    if with_waits:
        rows = (re.sub(r"(\d+)REDUCE_GRAD", r"\1REDUCE_GRAD,\1WAIT_REDUCE_GRAD", row) for row in rows)
    return "".join(rows)


@dataclass(frozen=True)
class CsvTable:
    """A parsed file, with enough of its text to point at a cell of it.

    Attributes:
        path: The file.
        cells: For each row, the text of its cells.
        programs: For each row, its actions.
        columns: For each row and action, the column of the cell that it stands in.
    """

    path: Path
    cells: tuple[tuple[str, ...], ...]
    programs: tuple[tuple[Action, ...], ...]
    columns: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        """One more than the highest stage that the file names."""
        return max(action.stage for program in self.programs for action in program) + 1

    @property
    def num_microbatches(self) -> int:
        """One more than the highest microbatch that the file names."""
        return max((action.microbatch or 0) for program in self.programs for action in program) + 1

    @property
    def placement(self) -> Placement:
        """Each stage on the rank whose row names it first.

        Raises:
            ScheduleError: A stage below the highest one is in no row, or a row has no stage of its own.
        """
        rank_of_stage: dict[int, int] = {}
        for rank, program in enumerate(self.programs):
            for action in program:
                rank_of_stage.setdefault(action.stage, rank)
        missing = next((stage for stage in range(self.num_stages) if stage not in rank_of_stage), None)
        if missing is not None:
            rank, column = next(
                (rank, column)
                for rank, (program, columns) in enumerate(zip(self.programs, self.columns, strict=True))
                for action, column in zip(program, columns, strict=True)
                if action.stage > missing
            )
            raise ScheduleError(
                f"{self.path}, rank {rank}, cell {column}: no row has actions of stage {missing}, but the highest "
                f"stage is {self.num_stages - 1}. Number stages from 0 without "
                f"gaps\n{picture(self.cells, rank, column)}"
            )
        empty = next((rank for rank in range(len(self.programs)) if rank not in rank_of_stage.values()), None)
        if empty is not None:
            stage = self.programs[empty][0].stage
            raise ScheduleError(
                f"{self.path}, rank {empty}, cell {self.columns[empty][0]}: rank {empty} holds no stage of its own. "
                f"Stage {stage} is on rank {rank_of_stage[stage]}, whose row names it "
                f"first\n{picture(self.cells, empty, self.columns[empty][0])}"
            )
        return Placement(len(self.programs), tuple(rank_of_stage[stage] for stage in range(self.num_stages)))

    def coded_programs(self, num_microbatches: int) -> tuple[Sequence[Action], ...]:
        """The programs as codes, which are checked and run faster; as they are if some action has no code.

        Args:
            num_microbatches: Of the schedule, at least as many as the file names.
        """
        if any(action.microbatch is None or not action.kind.has_microbatch for row in self.programs for action in row):
            return self.programs
        num_stages = self.num_stages
        return tuple(CodedProgram.of(program, num_stages, num_microbatches) for program in self.programs)

    def check_sizes(self, *, num_ranks: int | None, num_stages: int | None, num_microbatches: int | None) -> None:
        """Compare the sizes of the file with those of the run; None is not compared.

        Raises:
            ScheduleError: A size differs; all that differ are named.
        """
        wrong = [
            f"it has {found} {what}, the run has {wanted}"
            for what, found, wanted in (
                ("rows (ranks)", len(self.programs), num_ranks),
                ("stages", self.num_stages, num_stages),
                ("microbatches", self.num_microbatches, num_microbatches),
            )
            if wanted is not None and found != wanted
        ]
        if wrong:
            raise ScheduleError(f"{self.path} does not fit: {'; '.join(wrong)}")


def read_csv(path: Path) -> CsvTable:
    """Parse ``path``.

    Raises:
        ScheduleError: The file cannot be read, is empty, or has a cell that is not an action.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a mark at the beginning
        cells = tuple(tuple(row) for row in csv.reader(io.StringIO(text)) if row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"cannot read the schedule {path}: {error}") from error
    programs: list[tuple[Action, ...]] = []
    columns: list[tuple[int, ...]] = []
    for rank, row in enumerate(cells):
        actions = [
            (action, column)
            for column, cell in enumerate(row)
            for action in _parse_cell(path, cells, rank, column, cell)
        ]
        if not actions:
            raise ScheduleError(
                f"{path}: row {rank} has no action: every rank holds at least one stage\n{picture(cells, rank, 0)}"
            )
        programs.append(tuple(action for action, _ in actions))
        columns.append(tuple(column for _, column in actions))
    if not programs:
        raise ScheduleError(f"{path} is empty: write a row for each rank, with cells such as 0F0,0B0")
    return CsvTable(path, cells, tuple(programs), tuple(columns))


def _parse_cell(path: Path, cells: Sequence[Sequence[str]], rank: int, column: int, cell: str) -> list[Action]:
    """The actions of one cell: none if it is empty or implied, two if it is an overlapped pair."""
    is_plain = "_" not in cell  # most are, and a file may have a million
    if not cell.strip() or (not is_plain and _IMPLIED.fullmatch(cell)):
        return []
    overlap = None if is_plain else _OVERLAP.fullmatch(cell)
    try:
        return [Action.parse(part) for part in (overlap.group(1).split(";") if overlap else [cell])]
    except ScheduleError as error:
        raise ScheduleError(f"{path}, rank {rank}, cell {column}: {error}\n{picture(cells, rank, column)}") from None
