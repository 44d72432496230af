"""ZB-H1 and ZB-H2, the hand-made zero-bubble schedules of one stage a rank (arXiv:2401.10241, section 2.2).

Notation: p ranks, m microbatches, rank r; f, i, w, c the milliseconds of F, I, W and of a transfer. For m >= 2p the
bubble of H1 (k = 1) is ``(p - 1) * (f + i - w)`` with p microbatches held, that of H2 (k = 2)
``(p - 1) * (f + i + 2c - 2w)`` with 2p - 1 held.
"""

from __future__ import annotations

import numpy as np

from lightning_pp.schedule.program.coded import CodedProgram, F, I, W, in_order
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import Family, ScheduleRequest, register
from lightning_pp.schedule.schedule import Schedule


def build_zb_h(name: str, k: int, request: ScheduleRequest) -> Schedule:
    """Rank r warms up with ``u = k * (p - 1 - r)`` F, then repeats F, I, W with W delayed by ``k * (p - 1) - u``."""
    p, m = request.num_ranks, request.num_microbatches
    forward, backward = np.arange(m), np.arange(m)
    programs = []
    for rank in range(p):
        num_warmup = k * (p - 1 - rank)
        weight_delay = k * (p - 1) - num_warmup
        codes = in_order(
            ((F * p + rank) * m + forward, 3 * (forward - num_warmup)),
            ((I * p + rank) * m + backward, 3 * backward + 1),
            ((W * p + rank) * m + backward, 3 * (backward + weight_delay) + 2),
        )
        programs.append(CodedProgram(codes, p, m))
    return Schedule(name, Placement.interleaved(p), m, tuple(programs))


def build_zb_h1(request: ScheduleRequest) -> Schedule:
    """The memory of 1F1B and about a third of its bubble."""
    return build_zb_h("zb_h1", 1, request)


def build_zb_h2(request: ScheduleRequest) -> Schedule:
    """Almost no bubble, for up to twice the memory of 1F1B."""
    return build_zb_h("zb_h2", 2, request)


register(Family("zb_h1", build_zb_h1, "split backward in the memory of 1f1b; one stage a rank", max_stages_per_rank=1))
register(
    Family("zb_h2", build_zb_h2, "split backward in twice the memory of 1f1b; one stage a rank", max_stages_per_rank=1)
)
