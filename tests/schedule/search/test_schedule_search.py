"""What the search promises: legal, within the limit, never worse than by hand, near the optimum, the same each time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_strategies import stage_costs

from lightning_pp.errors import ScheduleError
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.schedule import Placement, StageCosts, available_schedules, build_schedule
from lightning_pp.schedule.merging import merge_where_nobody_waits
from lightning_pp.schedule.registry import schedule_family
from lightning_pp.schedule.search import auto
from lightning_pp.schedule.search.deadline import Deadline
from lightning_pp.schedule.search.greedy import Policy, build_greedy
from lightning_pp.schedule.search.justify import justify
from lightning_pp.schedule.search.problem import Problem
from lightning_pp.schedule.search.timing import Objective, earliest, find_length, latest
from lightning_pp.schedule.sharding import Sharding, ShardingMode

PROFILES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "published_profiles.json").read_text())
OPTIMA: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "optima.json").read_text())["problems"]


def smallest(number: int) -> list[dict[str, Any]]:
    return sorted(OPTIMA, key=lambda problem: len(problem["costs"]["forward"]) * problem["num_microbatches"])[:number]


def problem_request(problem: dict[str, Any]) -> dict[str, Any]:
    sizes = ("num_ranks", "num_microbatches", "stages_per_rank", "memory_limit")
    return {"costs": StageCosts(**problem["costs"]), **{name: problem[name] for name in sizes}}


def gaps_to_optimum(problems: list[dict[str, Any]]) -> list[float]:
    gaps = []
    for problem in problems:
        request = problem_request(problem)
        schedule = build_schedule("auto", **request)
        schedule.validate(costs=request["costs"], memory_limit=request["memory_limit"])
        gaps.append(schedule.simulate(request["costs"]).makespan / problem["makespan"] - 1)
    return gaps


def test_auto_is_near_the_optimum_of_a_few_problems() -> None:
    gaps = gaps_to_optimum(smallest(6))
    assert max(gaps) <= 0.02 and min(gaps) >= -1e-6
    assert sum(gaps) / len(gaps) <= 0.005


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_auto_is_near_the_optimum_of_all_problems() -> None:
    gaps = gaps_to_optimum(OPTIMA)
    assert max(gaps) <= 0.02
    assert sum(gaps) / len(gaps) <= 0.005
    assert min(gap for gap, problem in zip(gaps, OPTIMA, strict=True) if problem["is_proven"]) >= -1e-6


@settings(max_examples=5)
@given(data=st.data(), p=st.integers(1, 3), m=st.integers(1, 5), v=st.integers(1, 2))
def test_auto_is_legal_and_never_worse_than_by_hand(data: st.DataObject, p: int, m: int, v: int) -> None:
    costs = data.draw(stage_costs(p * v))
    limit = data.draw(st.sampled_from([None, float(v), 1.5 * v, float(p * v)]))
    schedule = build_schedule(
        "auto", num_ranks=p, num_microbatches=m, stages_per_rank=v, costs=costs, memory_limit=limit
    ).validate(costs=costs, memory_limit=limit)
    ours = schedule.simulate(costs)
    for name in available_schedules():
        family = schedule_family(name)
        if name == "auto" or not family.allows(v):
            continue
        try:
            other = build_schedule(
                name, num_ranks=p, num_microbatches=m, stages_per_rank=v, costs=costs, memory_limit=limit
            )
        except ScheduleError:
            continue
        theirs = other.simulate(costs)
        assert ours.makespan <= 1.0051 * theirs.makespan
        assert theirs.makespan > ours.makespan or max(ours.span_ms) <= 1.0001 * max(theirs.span_ms)


def test_auto_is_deterministic() -> None:
    request = problem_request(smallest(1)[0])
    assert build_schedule("auto", **request) == build_schedule("auto", **request)


class DeadlineAfter(Deadline):
    """Passes after so many looks at it, so that a search can be ended anywhere."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def has_passed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def allows(self, num_actions: int) -> bool:
        return not self.has_passed()


@pytest.mark.parametrize("whole_batch_loss", [False, True])
def test_a_search_that_is_ended_anywhere_is_legal_and_never_worse_than_by_hand(
    whole_batch_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = StageCosts([9.0, 7, 8, 12, 6, 9], [8.0, 9, 9, 11, 5, 9], [5.0, 6, 7, 8, 5, 6], p2p=0.7)
    request = {"num_ranks": 3, "num_microbatches": 7, "stages_per_rank": 2, "costs": costs, "memory_limit": 14}
    request["whole_batch_loss"] = whole_batch_loss
    by_hand = [build_schedule(name, **request) for name in ("interleaved_1f1b", "interleaved_zb", "zb_v", "v_half")]
    ends: list[DeadlineAfter] = []
    lengths = []
    for looks in (0, 1, 4, 30, 150, 500, 2_000, 10**9):
        monkeypatch.setattr(auto, "Deadline", lambda _, looks=looks: ends.append(DeadlineAfter(looks)) or ends[-1])
        found = build_schedule("auto", search_seconds=1.0, **request)
        found.validate(costs=costs, memory_limit=14)
        lengths.append(found.simulate(costs).makespan)
    assert ends[0].looks < 0 <= ends[-1].looks, "the first search was ended, and the last one was not"
    assert max(lengths) <= 1.005 * min(schedule.simulate(costs).makespan for schedule in by_hand)
    monkeypatch.undo()
    assert build_schedule("auto", **request).simulate(costs).makespan == lengths[-1]


def test_a_search_without_time_compares_what_is_made_by_hand() -> None:
    costs = StageCosts([9.0, 7, 8, 12], [8.0, 9, 9, 11], [5.0, 6, 7, 8], p2p=0.7)
    sizes = {"num_ranks": 4, "num_microbatches": 9, "costs": costs}
    found = build_schedule("auto", search_seconds=0.0, **sizes)
    by_hand = {name: build_schedule(name, **sizes).simulate(costs) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2")}
    best = min(by_hand, key=lambda name: max(by_hand[name].span_ms))
    assert found.name == f"auto ({best})"


@pytest.mark.by_day(2)
@pytest.mark.parametrize("whole_batch_loss", [False, True])
@pytest.mark.parametrize("sharding", [None, "shard_grad_op", "full_shard"])
def test_a_bound_holds_where_one_look_at_every_action_would_take_longer(
    sharding: ShardingMode | None, whole_batch_loss: bool
) -> None:
    num_ranks, num_microbatches = 96, 512
    costs = StageCosts(10.4, 10.2, 7.7, p2p=0.4, gather=3.0, reduce=2.0)
    units = tuple((f"{stage}",) for stage in range(num_ranks))
    begin = time.process_time()
    found = build_schedule(
        "auto",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        costs=costs,
        memory_limit=num_microbatches if whole_batch_loss else 2 * num_ranks,
        sharding=None if sharding is None else Sharding(sharding, units, {unit: 1 for (unit,) in units}),
        whole_batch_loss=whole_batch_loss,
        search_seconds=0.3,
    )
    assert time.process_time() - begin < 20  # a search takes minutes
    assert found.name in ("auto (zb_h1)", "auto (zb_h2)", "auto (1f1b)", "auto (gpipe)")
    found.validate()


def test_what_every_rank_asks_for_itself_is_bounded_by_no_time() -> None:
    source = schedule_source("auto", search_seconds=0.0)
    placement, costs = Placement.interleaved(3), StageCosts([9.0, 7, 8], [8.0, 9, 9], [5.0, 6, 7])
    alike = source.program(placement, 9, costs, 5.0, quick=True, on_every_rank=True)
    assert alike == schedule_source("auto").program(placement, 9, costs, 5.0, quick=True)
    assert source.program(placement, 9, costs, 5.0, quick=True).name == "auto (zb_h2)"


def test_too_small_a_limit_names_the_smallest_that_works() -> None:
    costs = StageCosts(1, 1, 1, held_after_forward=[2, 3, 1, 4], held_after_input=1)
    with pytest.raises(ScheduleError, match="memory_limit 4 is too small for any schedule.*that works is 6"):
        build_schedule("auto", num_ranks=2, num_microbatches=4, stages_per_rank=2, costs=costs, memory_limit=4)
    build_schedule("auto", num_ranks=2, num_microbatches=4, stages_per_rank=2, costs=costs, memory_limit=6)


def test_holding_more_after_the_input_gradient_uses_whole_backwards() -> None:
    costs = StageCosts(1, 1, 1, held_after_forward=1, held_after_input=1.5)
    for limit in (1, 3):
        schedule = build_schedule("auto", num_ranks=3, num_microbatches=4, costs=costs, memory_limit=limit)
        schedule.validate(costs=costs, memory_limit=limit)


@pytest.mark.parametrize(("row", "factor", "key"), [(1, 2, "zb_2p"), (3, 2, "zb_2p"), (3, 1, "zb_1p")])
def test_published_automatic_schedules(row: int, factor: int, key: str) -> None:
    profile = PROFILES["one_chunk_per_rank"][row]
    model = PROFILES["architectures"][profile["model"]]
    after_forward = 34 * model["hidden"] + 5 * model["heads"] * 1024
    costs = StageCosts(
        profile["forward_ms"],
        profile["backward_input_ms"],
        profile["backward_weight_ms"],
        profile["p2p_ms"],
        held_after_input=32 * model["hidden"] / after_forward,
    )
    p, m = profile["stages"], profile["microbatches"]
    schedule = build_schedule("auto", num_ranks=p, num_microbatches=m, costs=costs, memory_limit=factor * p)
    assert round(schedule.simulate(costs).bubble_fraction, 4) <= profile["bubble"][key]


@pytest.mark.parametrize(("name", "most", "peak"), [("v_half", 0.181, 17), ("v_min", 0.311, 12)])
def test_published_bubbles_of_little_memory(name: str, most: float, peak: int) -> None:
    row = PROFILES["two_chunks_per_rank"]["rows"][6]
    costs = StageCosts(row["forward_ms"], row["backward_input_ms"], row["backward_weight_ms"], row["p2p_ms"])
    simulation = build_schedule(name, num_ranks=32, num_microbatches=96, costs=costs).simulate(costs)
    assert simulation.bubble_fraction < most
    assert max(simulation.peak_memory) / 2 <= peak


@pytest.mark.parametrize("row", [0, 1, 3, 4], ids=["p16-m48", "p16-m64", "p24-m72", "p24-m96"])
def test_published_bubbles_of_zb_v(row: int) -> None:
    profile = PROFILES["two_chunks_per_rank"]["rows"][row]
    costs = StageCosts(
        profile["forward_ms"], profile["backward_input_ms"], profile["backward_weight_ms"], profile["p2p_ms"]
    )
    p, m = profile["ranks"], profile["microbatches"]
    schedule = build_schedule("zb_v", num_ranks=p, num_microbatches=m, costs=costs, memory_limit=2 * p)
    assert round(schedule.validate().simulate(costs).bubble_fraction, 4) <= profile["bubble"]["zb_v"]


@given(p=st.integers(1, 12), m=st.integers(1, 30))
@settings(max_examples=30)
def test_little_memory_is_little_at_every_size(p: int, m: int) -> None:
    for name, peak in (("v_half", (p + 2) // 2), ("v_min", (p + 4) // 3)):
        assert max(build_schedule(name, num_ranks=p, num_microbatches=m).simulate().peak_memory) <= 2 * peak


@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 8), v=st.integers(1, 2))
@settings(max_examples=40)
def test_greedy_and_justified_orders_are_legal(data: st.DataObject, p: int, m: int, v: int) -> None:
    costs = data.draw(stage_costs(p * v))
    placement = Placement.v_shaped(p) if v == 2 else Placement.interleaved(p)
    limit = float(data.draw(st.integers(v, 3 * p)) if 3 * p > v else v)
    problem = Problem.build(placement, m, costs, (limit,) * p)
    policy = data.draw(
        st.builds(
            Policy,
            weight_fit=st.sampled_from([0.0, 0.5, 1.0]),
            forward_waits=st.sampled_from([0.0, 1.0]),
            same_waits=st.sampled_from([0.0, 1.0]),
        )
    )
    orders = build_greedy(problem, policy)
    assert orders is not None
    starts = earliest(problem, orders)
    assert starts is not None
    before = find_length(problem, orders, starts)
    late = latest(problem, orders, before.due())
    assert all(e <= x + 1e-6 for es, xs in zip(starts, late, strict=True) for e, x in zip(es, xs, strict=True))
    better = justify(problem, orders, Objective())
    schedule = problem.schedule_of(better, "justified").validate(costs=costs, memory_limit=limit)
    simulation = schedule.simulate(costs)
    assert Objective().score(simulation.makespan, max(simulation.span_ms)) <= Objective().of(before) + 1e-6
    merged = merge_where_nobody_waits(schedule, costs).validate(costs=costs, memory_limit=limit)
    assert merged.simulate(costs).makespan == pytest.approx(simulation.makespan)
    assert merged.simulate(costs).span_ms == pytest.approx(simulation.span_ms)


def test_csv_path_is_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    build_schedule("zb_v", num_ranks=3, num_microbatches=5).to_csv(path)
    read = build_schedule(str(path), num_ranks=3, num_microbatches=5, stages_per_rank=2)
    assert read.placement == Placement.v_shaped(3)
    with pytest.raises(ScheduleError, match="it has 3 rows .*, the run has 4; it has 5 microbatches, the run has 6"):
        build_schedule(str(path), num_ranks=4, num_microbatches=6)
    with pytest.raises(ScheduleError, match="The smallest limit that works for it is 6"):
        build_schedule(str(path), num_ranks=3, num_microbatches=5, memory_limit=4)


@pytest.mark.parametrize("quick", [False, True])
def test_auto_keeps_to_a_placement(quick: bool) -> None:
    costs = StageCosts([5.0, 9.0, 6.0, 7.0], 8.0, 4.0, p2p=0.5)
    request: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 5, "stages_per_rank": 2, "costs": costs}
    for placement in (Placement.v_shaped(2), Placement.interleaved(2, 2)):
        schedule = build_schedule("auto", placement=placement, quick=quick, **request).validate()
        assert schedule.placement == placement
        for name in available_schedules():
            if name == "auto" or not schedule_family(name).allows(2):
                continue
            by_hand = build_schedule(name, **request)
            if by_hand.placement == placement:
                assert schedule.simulate(costs).makespan <= 1.005 * by_hand.simulate(costs).makespan
            else:
                with pytest.raises(ScheduleError, match=r"puts the stages on ranks .* but the pipeline needs them on"):
                    build_schedule(name, placement=placement, **request)
