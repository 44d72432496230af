"""ZB-V: two stages a rank in a V, no bubble when F, I and W take equal time, in the memory of 1F1B.

From "Pipeline Parallelism with Controllable Memory" (arXiv:2405.15362) and the appendix of arXiv:2401.10241. On rank
r, stage r is chunk 0 and stage 2p - 1 - r is chunk 1; F0 is the forward of chunk 0, and so on.
"""

from __future__ import annotations

from lightning_pp.schedule.families.choice import MOST_FITTED_ACTIONS, best_of
from lightning_pp.schedule.families.chunk_program import ChunkProgram
from lightning_pp.schedule.families.zb_v_greedy import build_by_rounds
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import Family, ScheduleRequest, register
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.search.problem import Problem
from lightning_pp.schedule.simulation.memory import exceeds, peaks_of


def build_zb_v_by_hand(request: ScheduleRequest) -> Schedule:
    """The pattern of the paper, made for at least ``2p - 1`` microbatches; fewer are a part of it."""
    p, m = request.num_ranks, request.num_microbatches
    placement = Placement.v_shaped(p)
    n = max(2 * p - 1, m)
    programs = []
    for rank in range(p):
        program = ChunkProgram(placement, rank, m)
        program.write("F0", 2 * (p - rank) - 1)
        program.write("F1 F0", rank)
        program.write("F1 I1 W1", p - rank)
        program.write("F0 I0 W0 F1 I1 W1", n - program.num_forwards[0])
        program.write("I0 W0 F1 I1 W1", n - program.num_forwards[1])
        program.write("I0 I1", rank)
        program.write("I0 W0", p - rank)
        program.write("W1", len(program.waiting[1]))
        program.write_waiting()
        programs.append(program.program())
    return Schedule("zb_v", placement, m, tuple(programs))


def build_zb_v(request: ScheduleRequest) -> Schedule:
    """The better, under the costs, of the pattern and what the rounds make in the same memory (or in the limit).

    A step of more than ``MOST_FITTED_ACTIONS`` is given the pattern, unless that holds more than the limit.
    """
    by_hand = build_zb_v_by_hand(request)
    is_large, limits = sum(map(len, by_hand.programs)) > MOST_FITTED_ACTIONS, request.memory_limit
    if is_large and (limits is None or not any(map(exceeds, peaks_of(by_hand, request.costs), limits))):
        return by_hand
    limits = limits or peaks_of(by_hand, request.costs)
    problem = Problem.build(by_hand.placement, request.num_microbatches, request.costs, limits)
    orders = build_by_rounds(problem)
    by_rounds = [] if orders is None else [problem.schedule_of(orders, "zb_v")]
    return best_of((by_hand, *by_rounds), request)


register(
    Family(
        "zb_v",
        build_zb_v,
        "two stages a rank in a V; nearly no bubble in the memory of 1f1b",
        default_stages_per_rank=2,
        has_fixed_stages=True,
    )
)
