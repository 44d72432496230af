"""Turn I and W that follow each other into B where that delays nobody, since a split backward costs more, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.engine import CostTables


def merge_first_stage(schedule: Schedule) -> Schedule:
    """Merge on stage 0, whose input gradient nobody waits for."""
    return _merge(schedule, lambda rank, cell: schedule.programs[rank][cell].stage == 0)


def _merge(schedule: Schedule, may_merge: Callable[[int, int], bool]) -> Schedule:
    """Merge each I (at ``rank``, ``cell``) with the W of its stage and microbatch in the next cell, where allowed."""
    programs = []
    for rank, program in enumerate(schedule.programs):
        merged: list[Action] = []
        skip = False
        for cell, action in enumerate(program):
            if skip:
                skip = False
                continue
            following = program[cell + 1] if cell + 1 < len(program) else None
            if (
                action.kind is ActionKind.I
                and following == Action(action.stage, ActionKind.W, action.microbatch)
                and may_merge(rank, cell)
            ):
                merged.append(Action(action.stage, ActionKind.B, action.microbatch))
                skip = True
            else:
                merged.append(action)
        programs.append(tuple(merged))
    return replace(schedule, programs=tuple(programs))


def merge_where_nobody_waits(schedule: Schedule, costs: StageCosts) -> Schedule:
    """Merge wherever, under ``costs``, the stage before gets the input gradient early enough from a B too.

    No action starts later than before.
    """
    simulation = schedule.simulate(costs)
    tables = CostTables.build(schedule.placement, costs)
    num_stages = schedule.placement.num_stages
    start = {
        (cell.action.stage, cell.action.microbatch): cell.start_ms
        for row in simulation.timeline
        for cell in row
        if cell.action.kind in (ActionKind.I, ActionKind.B)
    }

    def may_merge(rank: int, cell: int) -> bool:
        action = schedule.programs[rank][cell]
        if action.stage == 0:
            return True
        arrival = simulation.end_ms[rank][cell + 1] + tables.latency[num_stages + action.stage - 1]
        return arrival <= start[action.stage - 1, action.microbatch]

    return _merge(schedule, may_merge)


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
