"""Whether a schedule keeps all rules of :mod:`lightning_pp.schedule.validation`, in a second for a million actions.

The answer is only yes or no; where it is no, the checks of that module find the cell and say what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pp.schedule.program.coded import Codes
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.program.program import Programs
from lightning_pp.schedule.simulation.costs import UNIT_COSTS, StageCosts
from lightning_pp.schedule.simulation.engine import CostTables, codes_of
from lightning_pp.schedule.simulation.memory import exceeds, peaks_of
from lightning_pp.schedule.simulation.wide import run_programs


def keeps_rules(schedule: Programs, costs: StageCosts, limits: Sequence[float] | None) -> bool:
    """True for a schedule in which validation finds nothing wrong; false also where its programs are not codes.

    Args:
        schedule: What is checked.
        costs: Give what microbatches hold.
        limits: For each rank, the most it may hold; None for no limit.
    """
    placement, programs = schedule.placement, codes_of(schedule)
    if programs is None or schedule.num_microbatches < 1 or len(programs) != placement.num_ranks:
        return False
    if not all(_program_keeps_rules(schedule, rank, codes) for rank, codes in enumerate(programs)):
        return False
    run = run_programs(schedule, CostTables.build(placement, UNIT_COSTS))
    if any(len(starts) < len(codes) for starts, codes in zip(run.start, programs, strict=True)):
        return False
    return limits is None or not any(map(exceeds, peaks_of(schedule, costs), limits))


def _program_keeps_rules(schedule: Programs, rank: int, codes: Codes) -> bool:
    """The rules that look at one rank alone: every action once, each after what it needs of its own rank."""
    placement, m = schedule.placement, schedule.num_microbatches
    stages = placement.stages_of_rank(rank)
    if not len(codes) or codes.min() < 0 or codes.max() >= 4 * placement.num_stages * m:
        return False
    place_of_stage = np.full(placement.num_stages, -1)
    place_of_stage[list(stages)] = np.arange(len(stages))
    rows, microbatch = np.divmod(codes, m)
    kind, stage = np.divmod(rows, placement.num_stages)
    if (place_of_stage[stage] < 0).any():
        return False
    cells = np.full((4, len(stages), m), -1)
    cells[kind, place_of_stage[stage], microbatch] = np.arange(len(codes))
    forward, backward_input, weight, full = cells
    if np.count_nonzero(cells >= 0) != len(codes) or (forward < 0).any():
        return False
    if schedule.forward_only:
        return _follow_in_order(placement, stages, forward)
    is_split = (backward_input >= 0) & (weight >= 0) & (full < 0)
    is_full = (backward_input < 0) & (weight < 0) & (full >= 0)
    backward = np.maximum(backward_input, full)
    return bool(
        (is_split | is_full).all()
        and (forward < backward).all()
        and (weight > backward_input)[is_split].all()
        and _follow_in_order(placement, stages, forward)
        and _follow_in_order(placement, stages, -backward)
        and (not schedule.whole_batch_loss or forward.max() < backward.min())
    )


def _follow_in_order(placement: Placement, stages: Sequence[int], cells: Codes) -> bool:
    """Whether, for stages of a rank that follow each other in the model, ``cells`` (stage, microbatch) do too."""
    return all(
        bool((cells[place] < cells[place + 1]).all())
        for place in range(len(stages) - 1)
        if stages[place] + 1 == stages[place + 1]
    )
