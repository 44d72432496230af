"""V-Min and V-Half: a V in a third and in half of the memory of 1F1B (arXiv:2405.15362, appendix).

A microbatch is a building block of six passes of equal length on each rank, repeated every six slots; the offsets of
F0, F1, I1 and I0 decide how long it is held, W take the slots that are left. The peak is ``(p + 4) // 3`` microbatches
for V-Min and ``(p + 2) // 2`` for V-Half, a microbatch being both stages of a rank. The order is then fitted to the
real costs by moving passes of warm-up and cool-down, where the pattern leaves gaps, without holding more.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from lightning_pp.schedule.families.choice import MOST_FITTED_ACTIONS
from lightning_pp.schedule.program.coded import CodedProgram, Codes, F, I, W, in_order
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import Family, ScheduleRequest, register
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.search.justify import justify
from lightning_pp.schedule.search.problem import Problem
from lightning_pp.schedule.search.timing import Objective
from lightning_pp.schedule.simulation.memory import peaks_of

_PERIOD = 6
_MAX_ROUNDS_ACTIONS = 400_000
"""Effort of the fitting: rounds times actions."""
_MAX_PATIENT_ACTIONS = 20_000
"""With up to this many actions, another round follows one without gain."""


def _v_min_offsets(p: int, rank: int) -> dict[str, int]:
    extra = 2 if p % 3 == 0 else 0
    return {"F0": rank, "F1": 2 * p - rank - 1, "I1": 2 * p + extra + rank, "I0": 4 * p + extra - rank - 1}


def _v_half_offsets(p: int, rank: int) -> dict[str, int]:
    extra = 3 if p % 2 == 0 else 0
    return {
        "F0": 2 * rank,
        "F1": 3 * p - rank - 2,
        "I1": 3 * p + extra + 2 * rank - 1,
        "I0": 6 * p + extra - rank - 2,
    }


def _pattern(name: str, request: ScheduleRequest) -> Schedule:
    """The building block of every rank, repeated, with each W in the first free slot after its I."""
    p, m = request.num_ranks, request.num_microbatches
    offsets_of = _v_min_offsets if name == "v_min" else _v_half_offsets
    placement = Placement.v_shaped(p)
    n = placement.num_stages
    microbatches = np.arange(m)
    programs = []
    for rank in range(p):
        stages = placement.stages_of_rank(rank)
        slots, codes = [], []
        for token, offset in offsets_of(p, rank).items():
            row = (F if token[0] == "F" else I) * n + stages[int(token[1])]
            slots.append(offset + _PERIOD * microbatches)
            codes.append(row * m + microbatches)
        inputs = in_order(*((codes[token], slots[token]) for token in (2, 3)))
        weights = inputs + (W - I) * n * m
        weight_slots = _free_slots_after(np.sort(np.concatenate(slots[2:])), np.concatenate(slots))
        programs.append(CodedProgram(in_order(*zip(codes, slots, strict=True), (weights, weight_slots)), n, m))
    return Schedule(name, placement, m, tuple(programs))


def _free_slots_after(inputs: Codes, taken: Codes) -> Codes:
    """For each of ``inputs``, which are sorted, the first slot after it that is neither taken nor an earlier one's."""
    num_slots = int(taken.max()) + 1 + len(inputs)
    is_free = np.ones(num_slots, dtype=bool)
    is_free[taken] = False
    assert np.count_nonzero(~is_free) == len(taken), "no two passes of a block share a slot modulo the period"
    free = np.flatnonzero(is_free)
    turn = np.arange(len(inputs))
    return free[turn + np.maximum.accumulate(np.searchsorted(free, inputs) - turn)]


def build_v(name: str, request: ScheduleRequest) -> Schedule:
    """The pattern; in a step of at most ``MOST_FITTED_ACTIONS``, fitted to the costs in the memory of the pattern."""
    schedule = _pattern(name, request)
    num_actions = sum(map(len, schedule.programs))
    if num_actions > MOST_FITTED_ACTIONS:
        return schedule
    peaks = peaks_of(schedule, request.costs)
    problem = Problem.build(schedule.placement, request.num_microbatches, request.costs, peaks)
    max_rounds = max(2, min(12, _MAX_ROUNDS_ACTIONS // num_actions))
    orders = justify(
        problem,
        problem.orders_of(schedule),
        Objective(),
        max_rounds=max_rounds,
        patience=2 if num_actions <= _MAX_PATIENT_ACTIONS else 1,
    )
    return problem.schedule_of(orders, name)


for _name, _share in (("v_half", "half"), ("v_min", "a third")):
    register(
        Family(
            _name,
            partial(build_v, _name),
            f"two stages a rank in a V; {_share} of the memory of 1f1b",
            default_stages_per_rank=2,
            has_fixed_stages=True,
        )
    )
