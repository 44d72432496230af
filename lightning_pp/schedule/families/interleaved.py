"""Several stages a rank, taken in turns: interleaved 1F1B (arXiv:2104.04473) and its zero-bubble form.

Microbatches go through in groups of p: a rank takes p microbatches of its first stage, the same p of its second stage,
and so on. These turns are numbered, forwards and backwards each from 0.
A last group that is not full is built as if it were and the missing microbatches are left out of the programs, which
keeps every dependency.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_pp.schedule.families.choice import best_of
from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import Family, ScheduleRequest, register
from lightning_pp.schedule.schedule import Schedule

Turn = tuple[int, int]
"""A stage and a microbatch."""


def _turns(stages: Iterable[int], p: int, num_groups: int) -> list[Turn]:
    """The turns of one rank: groups of p microbatches, in each group the stages in the given order."""
    order = tuple(stages)
    return [(stage, group * p + j) for group in range(num_groups) for stage in order for j in range(p)]


def build_interleaved_1f1b(request: ScheduleRequest) -> Schedule:
    """Rank r warms up with ``2 * (p - 1 - r) + (v - 1) * p`` F (for v = 1, ``p - 1 - r``), then alternates F and B."""
    p, m, v = request.num_ranks, request.num_microbatches, request.stages_per_rank
    placement = Placement.interleaved(p, v)
    num_groups = -(-m // p)
    programs = []
    for rank in range(p):
        stages = placement.stages_of_rank(rank)
        forwards, backwards = _turns(stages, p, num_groups), _turns(reversed(stages), p, num_groups)
        num_warmup = p - 1 - rank if v == 1 else min(2 * (p - 1 - rank) + (v - 1) * p, len(forwards))
        program = [Action(stage, ActionKind.F, j) for stage, j in forwards[:num_warmup]]
        for turn, (stage, j) in enumerate(backwards):
            if num_warmup + turn < len(forwards):
                program.append(Action(forwards[num_warmup + turn][0], ActionKind.F, forwards[num_warmup + turn][1]))
            program.append(Action(stage, ActionKind.B, j))
        programs.append(_without_padding(program, m))
    return Schedule("interleaved_1f1b", placement, m, tuple(programs))


def build_interleaved_zb(request: ScheduleRequest) -> Schedule:
    """The better, under the costs and the limit, of warming up with the turns of ZB-H1 and with those of 1F1B."""
    return best_of((_interleaved_zb(k, request) for k in (1, 2)), request)


def _interleaved_zb(k: int, request: ScheduleRequest) -> Schedule:
    """Rank r warms up with ``u = k * (p - 1 - r) + (v - 1) * p`` F, then F, I and a W that is ``k * r`` turns old.

    The delay makes every rank hold what rank 0 holds, ``k * (p - 1) + (v - 1) * p + 1`` microbatches of a stage.
    """
    p, m, v = request.num_ranks, request.num_microbatches, request.stages_per_rank
    placement = Placement.interleaved(p, v)
    num_groups = -(-m // p)
    programs = []
    for rank in range(p):
        stages = placement.stages_of_rank(rank)
        forwards, backwards = _turns(stages, p, num_groups), _turns(reversed(stages), p, num_groups)
        num_warmup = min(k * (p - 1 - rank) + (v - 1) * p, len(forwards))
        program = [Action(stage, ActionKind.F, j) for stage, j in forwards[:num_warmup]]
        for turn, (stage, j) in enumerate(backwards):
            if num_warmup + turn < len(forwards):
                program.append(Action(forwards[num_warmup + turn][0], ActionKind.F, forwards[num_warmup + turn][1]))
            program.append(Action(stage, ActionKind.I, j))
            if turn >= k * rank:
                program.append(Action(backwards[turn - k * rank][0], ActionKind.W, backwards[turn - k * rank][1]))
        program += [Action(stage, ActionKind.W, j) for stage, j in backwards[max(0, len(backwards) - k * rank) :]]
        programs.append(_without_padding(program, m))
    return Schedule("interleaved_zb", placement, m, tuple(programs))


def _without_padding(program: list[Action], m: int) -> tuple[Action, ...]:
    return tuple(action for action in program if action.microbatch is not None and action.microbatch < m)


register(
    Family(
        "interleaved_1f1b",
        build_interleaved_1f1b,
        "1f1b over several stages a rank; less bubble, more memory and transfers",
        default_stages_per_rank=2,
    )
)
register(
    Family(
        "interleaved_zb",
        build_interleaved_zb,
        "interleaved_1f1b with split backward",
        default_stages_per_rank=2,
    )
)
