"""``lightning-pp-plan --search``: its plans against each one planned alone, its bounds against what they bound."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from planned import TINY, plan_config
from rich.console import Console

from lightning_pp.cli.plan.command import run_plan
from lightning_pp.cli.plan.report import Plan
from lightning_pp.cli.plan.run import make_plan
from lightning_pp.cli.plan.search.bounds import Blocks
from lightning_pp.cli.plan.search.plans import PlanSearch, SearchResult
from lightning_pp.cli.plan.search.report import Search
from lightning_pp.cli.plan.search.run import search_plans
from lightning_pp.cli.plan.search.space import Layout, ShardingChoice, words_of
from lightning_pp.cli.problems import UserError
from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.planning.refinement.choice import CutChoice
from lightning_pp.schedule import StageCosts

SMALL = ["model.num_layers=3", "data.batch_size=2", "peak_tflops=0.001", "link_gb_per_s=0.05", "schedules=[1f1b,zb_v]"]
FOUR = [*SMALL, "trainer.devices=4", "data.batch_size=8"]
GIB = float(1 << 30)


@pytest.fixture(autouse=True)
def no_leaked_hydra() -> Any:
    yield
    GlobalHydra.instance().clear()


def searched(*overrides: str) -> tuple[Search, str]:
    """The search on the tiny run, and what was printed."""
    stream = io.StringIO()
    search = search_plans(plan_config("search=true", *overrides), Console(file=stream))
    return search, stream.getvalue()


def alone(search: Search, words: list[str], *overrides: str) -> Plan:
    """The plan that the command makes of ``words``."""
    config = plan_config(*overrides, *words, "show=configured")
    plan = make_plan(config, Console(file=io.StringIO()))
    assert plan is not None
    return plan


@pytest.fixture(autouse=True)
def whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans alone cut between whole blocks, as a search does."""
    monkeypatch.setattr(CutChoice, "_refined", lambda *args: None)


@cache
def brute_force(*overrides: str) -> dict[tuple[Layout, ShardingChoice], Plan | str]:
    """Every plan of the space by itself: what is planned, or why it cannot be."""
    search, _ = searched(*overrides)
    found: dict[tuple[Layout, ShardingChoice], Plan | str] = {}
    for layout in search.space.layouts():
        for sharding in search.space.sharding_of(layout):
            words = words_of(layout, sharding, search.config, search.batch_size_key)
            try:
                found[layout, sharding] = alone(search, words, *overrides, f"schedules=[{layout.schedule}]")
            except (UserError, ConfigurationError, SplitError) as error:
                found[layout, sharding] = str(error)
    return found


def times_of_fitting(
    plans: dict[tuple[Layout, ShardingChoice], Plan | str], limit: float
) -> Iterator[tuple[float, Layout]]:
    for (layout, _), plan in plans.items():
        if isinstance(plan, Plan) and plan.shown.peak_bytes <= limit:
            yield plan.time_with_collectives, layout


@pytest.mark.parametrize("limit_gib", [None, 0.0018])
@pytest.mark.parametrize("run", [SMALL, pytest.param(FOUR, marks=pytest.mark.nightly)], ids=["two", "four"])
def test_the_best_plans_are_those_of_all_planned_alone(limit_gib: float | None, run: list[str]) -> None:
    overrides = [*run, *([] if limit_gib is None else [f"device_memory_gib={limit_gib}"])]
    search, _ = searched(*overrides)
    plans = brute_force(*run)
    limit = float("inf") if limit_gib is None else limit_gib * GIB
    assert search.result.num_plans == len(plans)
    best_of: dict[Layout, float] = {}
    for time, layout in times_of_fitting(plans, limit):
        best_of[layout] = min(time, best_of.get(layout, time))
    expected = sorted(best_of.values())[: len(search.result.best)]
    assert [plan.time_in_a_row for plan in search.result.best] == pytest.approx(expected, rel=1e-12)
    too_large = sum(isinstance(plan, Plan) and plan.shown.peak_bytes > limit for plan in plans.values())
    result = search.result
    assert result.num_too_large <= too_large
    assert len(result.impossible) == sum(isinstance(plan, str) for plan in plans.values())
    fitting = result.num_plans - result.num_too_large - result.num_slower - len(result.impossible)
    assert len(result.best) <= fitting <= result.num_cut
    for found in search.result.best:
        plan = plans[found.layout, found.sharding]
        assert isinstance(plan, Plan)
        assert found.planned.step_time == plan.shown.step_time
        assert found.planned.time_in_a_row == plan.shown.time_in_a_row
        assert found.time_in_a_row == plan.time_with_collectives
        assert found.planned.memory == plan.shown.memory
        assert found.planned.bubble_fraction == plan.shown.bubble_fraction
        assert found.planned.peak_bytes <= limit


@pytest.mark.nightly  # by day the best of two devices are those of all plans
@pytest.mark.parametrize("limit_gib", ["null", "0.0016"])
def test_what_is_left_out_on_64_devices_is_none_of_the_best(limit_gib: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = [
        "trainer.devices=64",
        "model.num_layers=6",
        "model.num_heads=8",
        "samples_per_step=64",
        "peak_tflops=0.01",
        "link_gb_per_s=0.2",
    ]
    names = ["schedules=[1f1b,interleaved_zb,zb_v,v_half]", f"device_memory_gib={limit_gib}"]
    pruned, _ = searched(*run, *names)
    with monkeypatch.context() as patched:
        patched.setattr(SearchResult, "longest", float("inf"))
        patched.setattr(PlanSearch, "_may_fit", lambda *args: True)
        everything, _ = searched(*run, *names)
    assert everything.result.num_slower == 0
    assert pruned.result.num_cut < 0.5 * everything.result.num_cut
    best, expected = (
        [(plan.layout, plan.sharding, plan.time_in_a_row) for plan in search.result.best]
        for search in (pruned, everything)
    )
    assert best == expected
    assert len({layout.num_tensor_ranks for layout, *_ in best}) > 1


def test_no_bound_is_above_what_a_plan_takes_and_holds() -> None:
    num_checked = 0
    for (layout, _), plan in brute_force(*SMALL).items():
        if isinstance(plan, str):
            continue
        num_ranks, number = layout.num_ranks, layout.num_microbatches
        recording = plan.cutter.recording(layout.num_stages)
        blocks = Blocks.of(recording, plan.costs, plan.cutter.options.cut)
        least = number * blocks.longest_work(num_ranks)
        assert 0.3 * plan.shown.time_in_a_row < least <= plan.shown.time_in_a_row <= plan.time_with_collectives
        need = blocks.least_need(blocks.state(plan.cutter.memory_model), num_ranks)
        assert 0.4 * plan.shown.peak_bytes < need <= plan.shown.peak_bytes
        num_checked += 1
    assert num_checked > 10


@pytest.mark.by_day(1)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_gathers_and_reductions_of_one_stage_are_those_of_rings(num_microbatches: int) -> None:
    def of(mode: str) -> tuple[Plan, float]:
        search_of = plan_config(
            "strategy.pipeline_parallel_size=1",
            f"strategy.num_microbatches={num_microbatches}",
            "strategy.schedule=1f1b",
            f"strategy.sharding={mode}",
            "show=configured",
            *FOUR,
        )
        plan = make_plan(search_of, Console(file=io.StringIO()))
        assert plan is not None
        return plan, plan.time_with_collectives - plan.shown.time_in_a_row

    plan, added = of("replicate")
    num_bytes = 4 * plan.shown.cut.summary.num_parameters
    one_way = 0.75 * num_bytes / 0.05e9 * 1e3  # of 4 ranks, milliseconds
    assert added == pytest.approx(2 * one_way, rel=0.01)  # an all-reduce
    assert of("shard_grad_op")[1] == pytest.approx(2 * one_way, rel=0.01)  # a gather and a reduce-scatter
    assert of("full_shard")[1] >= 0.99 * one_way


def test_where_nothing_fits_the_plan_that_needs_least_is_named() -> None:
    with pytest.raises(UserError, match=r"none of the \d+ plans for 2 devices of 0.001 GiB fits") as caught:
        searched(*SMALL, "device_memory_gib=0.001")
    plans = [plan for plan in brute_force(*SMALL).values() if isinstance(plan, Plan)]
    least = min(plan.shown.peak_bytes for plan in plans)
    assert f"needs {least / GIB:.3g} GiB on rank" in str(caught.value)


def test_replicas_stay_as_many_where_the_samples_of_a_batch_cannot_be_changed() -> None:
    search, _ = searched(*FOUR, "strategy.pipeline_parallel_size=2", "batch_size_key=data.no_such_name")
    assert {plan.layout.num_replicas for plan in search.result.best} == {2}
    assert not any(word.startswith("data.") for plan in search.result.best for word in search.words(plan))


def test_every_plan_has_the_samples_of_the_configured_step() -> None:
    sizes = ["strategy.pipeline_parallel_size=2", "strategy.data_parallel_size=2"]
    search, text = searched(*FOUR, *sizes)
    for layout in search.space.layouts():
        assert layout.num_replicas * layout.num_microbatches * layout.microbatch_size == 16
        assert layout.num_ranks * layout.num_tensor_ranks * layout.num_replicas == 4
    assert f"{search.result.num_plans} plans of 16 samples a step" in text
    best = search.result.best[0]
    assert f"1: {' '.join(search.words(best))}" in text
    with initialize_config_module("lightning_pp.conf", version_base="1.3"):
        trained = compose("config", overrides=[*TINY, "trainer.devices=4", *sizes, *search.words(best)])
    assert trained.strategy.schedule == best.layout.schedule
    assert trained.strategy.num_microbatches == best.layout.num_microbatches
    assert trained.data.batch_size == best.layout.batch_size


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["peak_tflops=null"], "Give device=NAME or peak_tflops=NUMBER"),
        (["out=folder"], "out= is for one of them"),
        (["strategy.split_points=[blocks.1]"], "strategy.split_points= is for one of them"),
        (["strategy.pipeline_parallel_size=8"], "does not divide the 4 devices.*samples_per_step=NUMBER"),
        (["samples_per_step=0"], "samples_per_step=0 must be at least 1"),
        (["batch_size_key=model.num_layers"], "model.num_layers=3, but the first batch has 8 samples"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        searched(*FOUR, *overrides)


def test_samples_of_a_step_can_be_said_for_other_devices_than_configured(capsys: pytest.CaptureFixture[str]) -> None:
    config = plan_config(*FOUR, "search=true", "strategy.pipeline_parallel_size=8", "samples_per_step=8")
    run_plan(config)
    printed = capsys.readouterr().out
    assert "plans of 8 samples a step" in printed
    assert "…" not in printed  # nothing is cut off


def test_samples_of_a_step_need_not_divide_the_batch() -> None:
    """Microbatches of three of eight samples take what they take in a batch of six."""
    run = [*SMALL, "data.batch_size=8", "schedules=[1f1b]"]
    search, _ = searched(*run, "samples_per_step=6")
    assert not search.result.impossible
    assert {layout.microbatch_size for layout in search.space.layouts()} >= {1, 3}
    of_three_first = sorted(search.result.best, key=lambda found: found.layout.microbatch_size != 3)
    for found in of_three_first[:4]:
        plan = alone(search, search.words(found), *run)
        assert plan.cutter.batch_size == found.layout.batch_size
        assert found.time_in_a_row == plan.time_with_collectives
        assert found.planned.memory == plan.shown.memory


def test_one_rank_by_itself_holds_one_microbatch_at_a_time() -> None:
    search, _ = searched(*SMALL, "schedules=[gpipe,zb_h1,1f1b]")
    alone_on_rank = {layout.schedule for layout in search.space.layouts() if layout.num_ranks == 1}
    assert alone_on_rank == {"zb_h1"}  # the first of those that do
    for found in search.result.best:
        if found.layout.num_ranks == 1:
            costs = StageCosts(1.0, 1.0, 1.0, held_after_forward=1.0, held_after_input=0.0)
            assert found.planned.schedule.simulate(costs).peak_memory == (1.0,)


def test_a_head_in_parts_goes_with_blocks_that_run_again() -> None:
    # nodes of one device leave tensor ranks out
    nodes = "trainer.devices=1", "trainer.num_nodes=2"
    search, _ = searched(*SMALL, *nodes, "strategy.split_head=2", "schedules=[1f1b]")
    assert not search.result.impossible
    cuts = [found.planned.cut.split for found in search.result.best if found.layout.num_ranks == 2]
    assert cuts and all(sum("[" in unit for unit in cut.partition.unit_costs) == 2 for cut in cuts)
