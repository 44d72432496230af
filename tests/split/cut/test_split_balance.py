"""Cuts of rows of blocks, against trying all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pp.schedule import Placement
from lightning_pp.split.cut.balance import TIME_SLACK, CutProblem, balanced_starts, even_starts

_NUMBER = st.floats(0.01, 10.0)


@st.composite
def problems(draw: st.DrawFn, kinds: tuple[str, ...] = ("one chunk", "V", "interleaved")) -> CutProblem:
    kind = draw(st.sampled_from(kinds))
    num_ranks = draw(st.integers(1, 4)) if kind == "one chunk" else draw(st.integers(2, 3))
    placement = {
        "one chunk": Placement.interleaved(num_ranks),
        "V": Placement.v_shaped(num_ranks),
        "interleaved": Placement.interleaved(num_ranks, 2),
    }[kind]
    n = draw(st.integers(placement.num_stages, 10))

    def numbers(count: int) -> list[float]:
        return draw(st.lists(_NUMBER, min_size=count, max_size=count))

    speeds = numbers(num_ranks) if draw(st.booleans()) else [1.0] * num_ranks
    return CutProblem(
        placement, numbers(n), speeds, numbers(n), numbers(n), numbers(placement.num_stages), None, numbers(n)
    )


def _all_cuts(problem: CutProblem) -> list[list[int]]:
    inner = range(1, problem.num_blocks)
    return [[0, *cuts] for cuts in combinations(inner, problem.placement.num_stages - 1)]


def _rank_times(problem: CutProblem, starts: list[int]) -> list[float]:
    totals = [0.0] * problem.placement.num_ranks
    for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], problem.num_blocks], strict=True)):
        rank = problem.placement.rank_of_stage[stage]
        totals[rank] += sum(problem.times[start:stop]) / problem.speeds[rank]
    return totals


def _rank_bytes(problem: CutProblem, starts: list[int]) -> list[float]:
    totals = [0.0] * problem.placement.num_ranks
    for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], problem.num_blocks], strict=True)):
        held = sum(problem.fixed_bytes[start:stop]) + problem.num_held[stage] * sum(problem.held_bytes[start:stop])
        totals[problem.placement.rank_of_stage[stage]] += held
    return totals


@settings(max_examples=150, deadline=None)
@given(problems(kinds=("one chunk", "V")))
def test_the_slowest_rank_is_as_fast_as_it_can_be(problem: CutProblem) -> None:
    starts = balanced_starts(problem)
    assert starts is not None
    assert starts == sorted(set(starts)) and starts[0] == 0 and len(starts) == problem.placement.num_stages
    least = min(max(_rank_times(problem, cuts)) for cuts in _all_cuts(problem))
    assert max(_rank_times(problem, starts)) <= least * (1 + TIME_SLACK + 1e-9)


@settings(max_examples=100, deadline=None)
@given(problems(kinds=("one chunk",)))
def test_among_cuts_that_are_as_fast_the_fewest_bytes_cross(problem: CutProblem) -> None:
    starts = balanced_starts(problem)
    assert starts is not None
    least = min(max(_rank_times(problem, cuts)) for cuts in _all_cuts(problem))
    rivals = [cuts for cuts in _all_cuts(problem) if max(_rank_times(problem, cuts)) <= least * (1 + TIME_SLACK)]
    assert sum(problem.crossing[cut] for cut in starts[1:]) == pytest.approx(
        min(sum(problem.crossing[cut] for cut in cuts[1:]) for cuts in rivals)
    )


@settings(max_examples=100, deadline=None)
@given(problems(kinds=("interleaved",)))
def test_no_single_move_makes_interleaved_stages_faster(problem: CutProblem) -> None:
    starts = balanced_starts(problem)
    assert starts is not None
    best = max(_rank_times(problem, starts))
    for stage in range(1, len(starts)):
        for cut in range(starts[stage - 1] + 1, ([*starts, problem.num_blocks])[stage + 1]):
            assert max(_rank_times(problem, [*starts[:stage], cut, *starts[stage + 1 :]])) >= best * (1 - 1e-6)


@settings(max_examples=150, deadline=None)
@given(problems(), st.floats(0.8, 3.0))
def test_memory_limits_are_kept_wherever_one_stage_a_rank_or_a_v_can(problem: CutProblem, scale: float) -> None:
    least = min(max(_rank_bytes(problem, cuts)) for cuts in _all_cuts(problem))
    limited = replace(problem, limits=[least * scale] * problem.placement.num_ranks)
    starts = balanced_starts(limited)
    if starts is not None:
        assert max(_rank_bytes(problem, starts)) <= least * scale * (1 + 1e-6)
    elif problem.placement.kind != "interleaved":
        assert scale < 1 + 1e-6
    legal = [cuts for cuts in _all_cuts(problem) if max(_rank_bytes(problem, cuts)) <= least * scale]
    if starts is not None and legal and problem.placement.kind != "interleaved":
        fastest = min(max(_rank_times(problem, cuts)) for cuts in legal)
        assert max(_rank_times(problem, starts)) <= fastest * (1 + TIME_SLACK + 1e-6)


def _sum_of_squares(problem: CutProblem, starts: list[int]) -> float:
    pairs = enumerate(zip(starts, [*starts[1:], problem.num_blocks], strict=True))
    return sum(
        (sum(problem.times[start:stop]) / problem.speeds[problem.placement.rank_of_stage[stage]]) ** 2
        for stage, (start, stop) in pairs
    )


@settings(max_examples=100, deadline=None)
@given(problems())
def test_even_stages_are_as_even_as_they_can_be(problem: CutProblem) -> None:
    starts = even_starts(problem)
    assert starts is not None
    least = min(_sum_of_squares(problem, other) for other in _all_cuts(problem))
    assert _sum_of_squares(problem, starts) == pytest.approx(least, rel=1e-9)
