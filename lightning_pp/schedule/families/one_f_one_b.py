"""1F1B: one forward, one backward, at most p microbatches held (PipeDream-Flush, arXiv:2006.09503)."""

from __future__ import annotations

import numpy as np

from lightning_pp.schedule.program.coded import B, CodedProgram, F, in_order
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import Family, ScheduleRequest, register
from lightning_pp.schedule.schedule import Schedule


def build_1f1b(request: ScheduleRequest) -> Schedule:
    """Rank r warms up with ``p - 1 - r`` F, alternates F and B, and ends with the B that are left."""
    p, m = request.num_ranks, request.num_microbatches
    forward, backward = np.arange(m), np.arange(m)
    programs = []
    for rank in range(p):
        num_warmup = p - 1 - rank
        codes = in_order(
            ((F * p + rank) * m + forward, 2 * (forward - num_warmup)),
            ((B * p + rank) * m + backward, 2 * backward + 1),
        )
        programs.append(CodedProgram(codes, p, m))
    return Schedule("1f1b", Placement.interleaved(p), m, tuple(programs))


register(Family("1f1b", build_1f1b, "one forward, one backward; one stage a rank", max_stages_per_rank=1))
