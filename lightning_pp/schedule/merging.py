"""Turn I and W that follow each other into B where that delays nobody, since a split backward costs more, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.coded import B, CodedProgram, I, W
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.engine import CostTables
from lightning_pp.schedule.simulation.wide import run_programs


def merge_first_stage(schedule: Schedule) -> Schedule:
    """Merge on stage 0, whose input gradient nobody waits for."""
    rank = schedule.placement.rank_of_stage[0]
    n, m = schedule.placement.num_stages, schedule.num_microbatches
    program = CodedProgram.of(schedule.programs[rank], n, m)
    merged = _merged(program, program.codes // m % n == 0)
    return replace(schedule, programs=(*schedule.programs[:rank], merged, *schedule.programs[rank + 1 :]))


def merge_where_nobody_waits(schedule: Schedule, costs: StageCosts) -> Schedule:
    """Merge wherever, under ``costs``, the stage before gets the input gradient early enough from a B too.

    No action starts later than before.
    """
    tables = CostTables.build(schedule.placement, costs, whole_batch_loss=schedule.whole_batch_loss)
    run = run_programs(schedule, tables)
    latency = np.array(tables.latency)
    n, m = schedule.placement.num_stages, schedule.num_microbatches
    programs = [CodedProgram.of(program, n, m) for program in schedule.programs]
    needed_at = np.full((n, m), np.inf)
    """For each stage and microbatch, when the stage before starts its I or B; nothing waits for stage 0."""
    for program, starts in zip(programs, run.start, strict=True):
        kinds, stages, microbatches = program.parts()
        feeds = ((kinds == I) | (kinds == B)) & (stages + 1 < n)
        needed_at[stages[feeds] + 1, microbatches[feeds]] = starts[feeds]
    merged = []
    for program, ends in zip(programs, run.end, strict=True):
        _, stages, microbatches = program.parts()
        arrival = np.append(ends[1:], 0.0) + np.where(stages > 0, latency[n + stages - 1], 0.0)
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
    programs = []
    for program in schedule.programs:
        split: list[Action] = []
        for action in program:
            if action.kind is ActionKind.B:
                split += [replace(action, kind=ActionKind.I), replace(action, kind=ActionKind.W)]
            else:
                split.append(action)
        programs.append(tuple(split))
    return replace(schedule, programs=tuple(programs))
