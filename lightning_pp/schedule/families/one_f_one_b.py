"""1F1B: one forward, one backward, at most p microbatches held (PipeDream-Flush, arXiv:2006.09503)."""

from __future__ import annotations

from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import Family, ScheduleRequest, register
from lightning_pp.schedule.schedule import Schedule


def build_1f1b(request: ScheduleRequest) -> Schedule:
    """Rank r warms up with ``p - 1 - r`` F, alternates F and B, and ends with the B that are left."""
    p, m = request.num_ranks, request.num_microbatches
    programs = []
    for rank in range(p):
        num_warmup = min(p - 1 - rank, m)
        program = [Action(rank, ActionKind.F, j) for j in range(num_warmup)]
        for j in range(m):
            if num_warmup + j < m:
                program.append(Action(rank, ActionKind.F, num_warmup + j))
            program.append(Action(rank, ActionKind.B, j))
        programs.append(tuple(program))
    return Schedule("1f1b", Placement.interleaved(p), m, tuple(programs))


register(Family("1f1b", build_1f1b, "one forward, one backward; one stage a rank", max_stages_per_rank=1))
