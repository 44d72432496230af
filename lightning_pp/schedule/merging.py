"""Turn neighbouring I and W into B where that delays no rank, since a split backward costs more, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning_pp.schedule.program.coded import B, CodedProgram, I, W
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.execution import CostTables


def merge_first_stage(schedule: Schedule) -> Schedule:
    """Merge on stage 0, for whose input gradient no rank waits."""
    rank = schedule.placement.rank_of_stage[0]
    program = schedule.coded[rank]
    merged = _merged(program, program.parts()[1] == 0)
    return replace(schedule, programs=(*schedule.programs[:rank], merged, *schedule.programs[rank + 1 :]))


def merge_where_nobody_waits(schedule: Schedule, costs: StageCosts) -> Schedule:
    """Merge wherever, under ``costs``, the stage before gets the input gradient early enough from a B too.

    No action starts later than before.
    """
    tables, execution = CostTables.build(schedule.placement, costs), schedule.execution
    run = execution.run(tables)
    n, m = schedule.placement.num_stages, schedule.num_microbatches
    needed_at = np.full((n, m), np.inf)
    """For each stage and microbatch, when the stage before starts its I or B; nothing waits for stage 0."""
    for program, slots in zip(schedule.coded, execution.slots, strict=True):
        kinds, stages, microbatches = program.parts()
        feeds = ((kinds == I) | (kinds == B)) & (stages + 1 < n)
        needed_at[stages[feeds] + 1, microbatches[feeds]] = run.start[slots[feeds]]
    merged = []
    for program, slots in zip(schedule.coded, execution.slots, strict=True):
        _, stages, microbatches = program.parts()
        arrival = np.append(run.end[slots[1:]], 0.0) + np.where(stages > 0, tables.latency[n + stages - 1], 0.0)
        merged.append(_merged(program, arrival <= needed_at[stages, microbatches]))
    return replace(schedule, programs=tuple(merged))


def _merged(program: CodedProgram, may_merge: npt.NDArray[np.bool_]) -> CodedProgram:
    """``program`` with each I and the W of its stage and microbatch in the next cell in one, where allowed.

    Args:
        program: Programs are not changed.
        may_merge: For each cell, whether an I in it may be merged.
    """
    codes = program.codes
    is_input = codes // (program.num_stages * program.num_microbatches) == I
    is_followed = np.append(codes[1:] - codes[:-1], 0) == (W - I) * program.num_stages * program.num_microbatches
    first = np.flatnonzero(is_input & is_followed & may_merge)
    merged = codes.copy()
    merged[first] += (B - I) * program.num_stages * program.num_microbatches
    return program.with_codes(np.delete(merged, first + 1))


def split_backwards(schedule: Schedule) -> Schedule:
    """Every B as I and W in a row, for a step that measures the two apart; legal wherever the schedule was."""
    programs = tuple(split_at(program, np.flatnonzero(program.parts()[0] == B)) for program in schedule.coded)
    return replace(schedule, programs=programs)


def split_at(program: CodedProgram, cells: npt.NDArray[np.int64]) -> CodedProgram:
    """``program`` with the B in ``cells``, which ascend, as I and W in a row."""
    step = program.num_stages * program.num_microbatches
    codes = program.codes.copy()
    codes[cells] -= (B - I) * step
    return program.with_codes(np.insert(codes, cells + 1, codes[cells] + (W - I) * step))
