"""Plans of gathers against an exhaustive search."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pp.schedule.gathering import MOST_EXTRA_GATHERS, fewest_gathers, plan_gathers, without_repeats


def fewest_of_all_plans(uses: tuple[int, ...], num_bytes: dict[int, int], budget: int) -> int:
    """The fewest gathers of any plan that gathers on demand (to gather ahead saves none), by trying all evictions."""
    fewest = {frozenset[int](): 0}
    for item in uses:
        following: dict[frozenset[int], int] = {}
        for held, count in fewest.items():
            if item in held:
                options = [(held, count)]
            else:
                options = [
                    (frozenset(kept) | {item}, count + 1)
                    for size in range(len(held) + 1)
                    for kept in combinations(held, size)
                    if sum(num_bytes[other] for other in kept) + num_bytes[item] <= budget
                ]
            for state, gathers in options:
                following[state] = min(following.get(state, gathers), gathers)
        fewest = following
    return min(fewest.values())


@st.composite
def problems(draw: st.DrawFn, *, even: bool) -> tuple[list[int], dict[int, int], int]:
    count = draw(st.integers(2, 5))
    sizes = st.just(2) if even else st.integers(1, 4)
    num_bytes = {item: draw(sizes) for item in range(count)}
    uses = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=24))
    return uses, num_bytes, draw(st.integers(max(num_bytes.values()), sum(num_bytes.values())))


@given(problems(even=True))
def test_fewest_is_the_fewest_for_items_of_one_size(problem: tuple[list[int], dict[int, int], int]) -> None:
    uses, num_bytes, budget = problem
    fewest = fewest_of_all_plans(without_repeats(uses), num_bytes, budget)
    assert fewest_gathers(uses, num_bytes, budget) == fewest
    assert fewest <= plan_gathers(uses, num_bytes, budget).num_gathers <= MOST_EXTRA_GATHERS * fewest


@given(problems(even=False))
def test_plans_hold_what_is_used_within_the_budget(problem: tuple[list[int], dict[int, int], int]) -> None:
    uses, num_bytes, budget = problem
    plan = plan_gathers(uses, num_bytes, budget)
    held: set[int] = set()
    for step, item in zip(plan.steps, plan.uses, strict=False):
        assert held.issuperset(step.frees) and held.isdisjoint(step.gathers)
        held = held.difference(step.frees).union(step.gathers)
        assert item in held
        assert sum(num_bytes[other] for other in held) <= budget
    assert held == set(plan.steps[-1].frees) and not plan.steps[-1].gathers
    assert fewest_of_all_plans(plan.uses, num_bytes, budget) <= plan.num_gathers


def test_gathers_start_as_early_as_there_is_room() -> None:
    """With room for three of four in turn, the next is under way while one is used."""
    plan = plan_gathers("abcd" * 3, dict.fromkeys("abcd", 1), 4)
    assert [step.gathers for step in plan.steps if step.gathers] == [("a", "b", "c", "d")]
    plan = plan_gathers("abcabc", dict.fromkeys("abc", 1), 2)
    started = {step: set(plan.steps[step].gathers) for step in range(6)}
    assert started[0] == {"a", "b"}
    with pytest.raises(ValueError, match="3 bytes does not fit a budget of 2"):
        plan_gathers("ab", {"a": 3, "b": 1}, 2)


@pytest.mark.parametrize(("budget", "gathers"), [(1, 49), (2, 34), (3, 19), (4, 4)])
def test_forward_and_backward_over_four_units(budget: int, gathers: int) -> None:
    """The table in docs/training/sharding.md: eight times F and B over four equal units."""
    plan = plan_gathers("abcddcba" * 8, dict.fromkeys("abcd", 1), budget)
    assert plan.num_gathers == gathers
    if budget < 3:  # one unit at a time, or two: the closed form of turning round at each end
        assert gathers == 16 * (4 - budget) + budget
