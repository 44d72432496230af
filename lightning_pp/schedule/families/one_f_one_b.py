"""1F1B (PipeDream-Flush, arXiv:2006.09503) and its variants: split backwards, and several stages a rank.

With one stage a rank and a split backward it is ZB-H1 or ZB-H2 (arXiv:2401.10241, section 2.2). With several stages a
rank it is interleaved 1F1B (arXiv:2104.04473), or the zero-bubble form of that.

Notation: p ranks, m microbatches, v stages a rank, rank r; f, i, w, c the milliseconds of F, I, W and of a transfer.
For m >= 2p the bubble of H1 (k = 1) is ``(p - 1) * (f + i - w)`` with p microbatches held, that of H2 (k = 2)
``(p - 1) * (f + i + 2c - 2w)`` with 2p - 1 held.

Microbatches go through in groups of p: a rank takes p microbatches of its first stage, the same p of its second stage,
and so on. These turns are numbered, forwards and backwards each from 0.
A last group that is not full is built as if it were and the missing microbatches are left out of the programs, which
keeps every dependency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from lightning_pp.schedule.families.choice import MOST_FITTED_ACTIONS, best_of
from lightning_pp.schedule.program.coded import B, CodedProgram, Codes, F, I, W, in_order
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import Family, ScheduleRequest, register
from lightning_pp.schedule.schedule import Schedule


class _Turns:
    """The turns of one rank: groups of p microbatches, in each group the stages in the given order.

    Attributes:
        stage: For each turn, its stage.
        microbatch: For each turn, its microbatch, which may be one that is left out.
        number: For each turn, its number.
    """

    def __init__(self, stages: Sequence[int], p: int, m: int) -> None:
        num_groups = -(-m // p)
        shape = (num_groups, len(stages), p)
        self.stage = np.broadcast_to(np.array(stages)[:, None], shape).ravel()
        self.microbatch = np.broadcast_to(np.arange(num_groups * p).reshape(num_groups, 1, p), shape).ravel()
        self.number = np.arange(len(self.stage))
        self._is_left_out = self.microbatch >= m
        self._num_stages, self._m = len(stages) * p, m

    def placed(self, kind: int, places: Codes) -> tuple[Codes, Codes]:
        """The actions of ``kind`` with their places, given the place of each turn; what is left out is not in it."""
        codes = (kind * self._num_stages + self.stage) * self._m + self.microbatch
        return codes[~self._is_left_out], places[~self._is_left_out]


def _turns_of_ranks(placement: Placement, m: int) -> Iterator[tuple[int, _Turns, _Turns]]:
    """Each rank, with the turns of its forwards and those of its backwards."""
    for rank in range(placement.num_ranks):
        stages = placement.stages_of_rank(rank)
        yield rank, _Turns(stages, placement.num_ranks, m), _Turns(stages[::-1], placement.num_ranks, m)


def build_1f1b(name: str, request: ScheduleRequest) -> Schedule:
    """Rank r warms up with ``2 * (p - 1 - r) + (v - 1) * p`` F (for v = 1, ``p - 1 - r``), then alternates F and B."""
    p, m, v = request.num_ranks, request.num_microbatches, request.stages_per_rank
    placement = Placement.interleaved(p, v)
    programs = []
    for rank, forwards, backwards in _turns_of_ranks(placement, m):
        num_warmup = p - 1 - rank if v == 1 else 2 * (p - 1 - rank) + (v - 1) * p
        codes = in_order(
            forwards.placed(F, 2 * (forwards.number - num_warmup)),
            backwards.placed(B, 2 * backwards.number + 1),
        )
        programs.append(CodedProgram(codes, placement.num_stages, m))
    return Schedule(name, placement, m, tuple(programs))


def build_split(name: str, k: int, request: ScheduleRequest) -> Schedule:
    """Rank r warms up with ``u = k * (p - 1 - r) + (v - 1) * p`` F, then F, I and a W that is ``k * r`` turns old.

    The delay makes every rank hold what rank 0 holds, ``k * (p - 1) + (v - 1) * p + 1`` microbatches of a stage.
    """
    p, m, v = request.num_ranks, request.num_microbatches, request.stages_per_rank
    placement = Placement.interleaved(p, v)
    programs = []
    for rank, forwards, backwards in _turns_of_ranks(placement, m):
        num_warmup = k * (p - 1 - rank) + (v - 1) * p
        codes = in_order(
            forwards.placed(F, 3 * (forwards.number - num_warmup)),
            backwards.placed(I, 3 * backwards.number + 1),
            backwards.placed(W, 3 * (backwards.number + k * rank) + 2),
        )
        programs.append(CodedProgram(codes, placement.num_stages, m))
    return Schedule(name, placement, m, tuple(programs))


def build_interleaved_zb(request: ScheduleRequest) -> Schedule:
    """The better warm-up under the costs and the limit, ZB-H1 or 1F1B; in very large steps ZB-H1, which holds less."""
    both = [build_split("interleaved_zb", k, request) for k in (1, 2)]
    return both[0] if sum(map(len, both[0].programs)) > MOST_FITTED_ACTIONS else best_of(both, request)


for _name, _build, _summary in (
    ("1f1b", partial(build_1f1b, "1f1b"), "one forward, one backward; one stage a rank"),
    ("zb_h1", partial(build_split, "zb_h1", 1), "split backward in the memory of 1f1b; one stage a rank"),
    ("zb_h2", partial(build_split, "zb_h2", 2), "split backward in twice the memory of 1f1b; one stage a rank"),
):
    register(Family(_name, _build, _summary, has_fixed_stages=True))
register(
    Family(
        "interleaved_1f1b",
        partial(build_1f1b, "interleaved_1f1b"),
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
