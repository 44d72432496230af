"""GPipe: all forwards, then all backwards (arXiv:1811.06965); with several stages a rank, the looped form of it."""

from __future__ import annotations

import numpy as np

from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.coded import B, CodedProgram, F
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import Family, ScheduleRequest, register
from lightning_pp.schedule.schedule import Schedule


def build_gpipe(request: ScheduleRequest) -> Schedule:
    """On each rank, F of every microbatch stage by stage, then B of every microbatch stage by stage from the last."""
    placement = Placement.interleaved(request.num_ranks, request.stages_per_rank)
    n, m = placement.num_stages, request.num_microbatches
    programs = []
    for rank in range(request.num_ranks):
        stages = placement.stages_of_rank(rank)
        rows = [F * n + stage for stage in stages] + [B * n + stage for stage in reversed(stages)]
        codes = np.concatenate([row * m + np.arange(m) for row in rows])
        programs.append(CodedProgram(codes, n, m))
    return Schedule("gpipe", placement, m, tuple(programs))


def build_forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """F of every stage and microbatch and nothing else, for evaluation; works on every placement.

    With one stage a rank and with several, a rank takes the microbatches of a stage before those of its next stage,
    in groups of ``num_ranks``, so that a stage further down the model starts before all microbatches are through.
    """
    groups = [
        range(first, min(first + placement.num_ranks, num_microbatches))
        for first in range(0, num_microbatches, placement.num_ranks)
    ]
    programs = tuple(
        tuple(
            Action(stage, ActionKind.F, j)
            for group in groups
            for stage in placement.stages_of_rank(rank)
            for j in group
        )
        for rank in range(placement.num_ranks)
    )
    return Schedule("forward_only", placement, num_microbatches, programs).validate()


register(Family("gpipe", build_gpipe, "all forwards, then all backwards; holds every microbatch"))
