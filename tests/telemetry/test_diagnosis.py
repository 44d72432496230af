"""Findings about emulated pipelines: they name the cause, and their overrides bring what was promised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from emulated_world import World, best_cut, blocks

from lightning_pp.schedule import build_schedule
from lightning_pp.split.cut.unit_costs import UnitCost
from lightning_pp.telemetry.diagnosis.collection import RankSteps, usual_steps
from lightning_pp.telemetry.diagnosis.diagnose import MOST_FINDINGS, WORTH_TELLING, Diagnosis, diagnose
from lightning_pp.telemetry.diagnosis.evidence import Evidence
from lightning_pp.telemetry.diagnosis.finding import Finding

LEAST_REACHED = 0.8
EVEN = ["blocks.2", "blocks.4", "blocks.6"]
#: Even stages, enough microbatches, a schedule without much of a bubble: nothing to tell.
GOOD = World(blocks(8), EVEN, schedule="zb_h2", num_microbatches=32)
USUAL = replace(GOOD, schedule="zb_h1")


@dataclass(frozen=True)
class Case:
    """A pipeline with something wrong, and what has to be found first."""

    world: World
    cause: str
    said: Sequence[str]


CASES = {
    "slow stage": Case(
        World(blocks(12), ["blocks.2", "blocks.7", "blocks.9"], schedule="zb_h1"),
        "cuts",
        ["Stage 1 takes 66% longer than the mean", "before blocks.3 and blocks.6 and blocks.9"],
    ),
    "slow rank": Case(
        replace(World(blocks(16), ["blocks.4", "blocks.8", "blocks.12"]), speeds=(1.0, 1.0, 0.5, 1.0)),
        "slow_rank",
        ["Rank 2 on host node2 takes 2 times as long", "units of the same class and size (blocks)"],
    ),
    "slow link": Case(
        replace(USUAL, links=(0.2, 12.0, 0.2), num_microbatches=16),
        "slow_link",
        ["between rank 1 and rank 2 (node1 and node2) take 12 ms, but 0.2 ms over other links"],
    ),
    "slow data": Case(
        replace(USUAL, loader_ms=(60.0,) * 4),
        "data",
        ["for its loader, which has no worker processes", "data.num_workers=2"],
    ),
    "slow data on one rank": Case(
        replace(USUAL, loader_ms=(0.0, 60.0, 0.0, 0.0)), "data", ["Rank 1 on host node1 waits 23% of each step"]
    ),
    "too few workers": Case(
        replace(USUAL, loader_ms=(900.0,) * 4, num_workers=2), "data", ["which has 2 worker processes"]
    ),
    "too few microbatches": Case(
        replace(USUAL, num_microbatches=4, schedule="1f1b", links=(0.0,) * 3, action_ms=0.0),
        "microbatches",
        ["4 microbatches on 4 ranks leave 43% bubble. 16 microbatches of size ", " would leave 16%"],
    ),
    "another schedule": Case(replace(GOOD, schedule="gpipe"), "schedule", ["gpipe leaves 9% bubble", "would leave"]),
}


def changed(world: World, override: str) -> World:
    """The world under an override of the command line."""
    name, _, value = override.partition("=")
    changes: dict[str, Callable[[], World]] = {
        "strategy.split_points": lambda: replace(world, cut=value.strip("'[]").split(",")),
        "strategy.num_microbatches": lambda: replace(world, num_microbatches=int(value)),
        "strategy.schedule": lambda: replace(world, schedule=value),
        "data.num_workers": lambda: replace(world, num_workers=int(value)),
    }
    return changes[name]()


def check_promises(world: World, diagnosis: Diagnosis, seed: int = 0) -> None:
    """Every override that is told brings most of what is told of it."""
    before = world.run(seed)[0]
    for finding in diagnosis.findings:
        if finding.override:
            after = changed(world, finding.override).run(seed)[0]
            assert before - after >= LEAST_REACHED * finding.gain_ms, f"{finding.text}: {before:.1f} to {after:.1f} ms"
        assert finding.gain_fraction == pytest.approx(finding.gain_ms / before, rel=0.01)
        assert finding.gain_fraction >= WORTH_TELLING


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_first_and_every_override_brings_what_it_promises(name: str) -> None:
    case = CASES[name]
    diagnosis = diagnose(case.world.evidence())
    assert diagnosis.findings, diagnosis.text
    first = diagnosis.findings[0]
    assert first.cause == case.cause, diagnosis.text
    for words in case.said:
        assert words in first.text
    gains = [finding.gain_ms for finding in diagnosis.findings]
    assert gains == sorted(gains, reverse=True) and len(gains) <= MOST_FINDINGS
    check_promises(case.world, diagnosis)


@pytest.mark.by_day(4)
@pytest.mark.parametrize("name", CASES)
def test_with_noise_the_cause_and_the_promises_are_the_same(name: str) -> None:
    case = CASES[name]
    world = replace(case.world, noise=0.04)
    diagnosis = diagnose(world.evidence(seed=3))
    assert case.cause in [finding.cause for finding in diagnosis.findings], diagnosis.text
    check_promises(world, diagnosis, seed=3)


@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_of_a_good_pipeline_nothing_is_told(noise: float) -> None:
    diagnosis = diagnose(replace(GOOD, noise=noise).evidence(seed=1))
    assert diagnosis.is_explained
    assert not diagnosis.findings, diagnosis.text
    assert "no simulated change saves 3%" in diagnosis.text


def test_weight_gradients_that_cannot_be_deferred_are_told_with_what_they_would_save() -> None:
    world = replace(GOOD, num_microbatches=8, deferred=0.05)
    first = diagnose(world.evidence()).findings[0]
    assert first.cause == "weight_gradients"
    # rank 0 of zb_h2 has nothing but B
    named = "blocks.2.weight, blocks.3.weight, blocks.4.weight and 3 more (stages 1, 2, 3) are not deferred"
    assert f"The weight gradients of {named}" in first.text
    saved = world.run()[0] - replace(world, deferred=1.0).run()[0]
    assert saved >= LEAST_REACHED * first.gain_ms > 0


def test_work_of_backward_that_is_of_no_weight_is_not_taken_for_weight_gradients() -> None:
    """Norms, activations and attention that take longer than their FLOPs say make I longer, and nothing can be done."""
    world = replace(GOOD, num_microbatches=8, deferred=0.05, all_deferred=True)
    assert "weight_gradients" not in [finding.cause for finding in diagnose(world.evidence()).findings]


def test_a_slow_unit_is_not_taken_for_a_slow_rank() -> None:
    """Units of another class may take longer by FLOPs; the rank that has them is not to blame."""
    slow = {f"slow.{index}": (2.0, 2.0, 2.0) for index in range(4)}
    units = {**{f"blocks.{i}": (1.0, 1.0, 1.0) for i in range(8)}, **slow, "blocks.8": (1.0, 1.0, 1.0)}
    world = World(units, ["blocks.4", "slow.0", "blocks.8"], schedule="zb_h1")
    evidence = world.evidence()
    same_flops = {unit: UnitCost(1e9, 1e9, 1e9) for unit in units}
    evidence = replace(evidence, facts=replace(evidence.facts, unit_costs=same_flops))
    causes = [finding.cause for finding in diagnose(evidence).findings]
    assert "cuts" in causes and "slow_rank" not in causes


def test_what_the_parts_of_a_step_do_not_explain_is_not_told() -> None:
    world = CASES["slow stage"].world
    evidence = world.evidence()
    ranks = [replace(rank, data_ms=400.0) for rank in evidence.ranks]  # of a loader that cannot have taken so long
    diagnosis = diagnose(Evidence.of(world.program, ranks, evidence.facts))
    assert not diagnosis.is_explained and not diagnosis.findings
    assert "the simulator cannot tell" in diagnosis.text


def test_the_only_link_of_a_host_is_compared_with_nothing() -> None:
    world = World(blocks(8), ["blocks.4"], speeds=(1.0, 1.0), links=(8.0,), num_microbatches=4, schedule="1f1b")
    evidence = world.evidence()
    assert "slow_link" in [finding.cause for finding in diagnose(evidence).findings]  # between node0 and node1
    ranks = [replace(rank, host="here") for rank in evidence.ranks]
    causes = [finding.cause for finding in diagnose(replace(evidence, ranks=ranks)).findings]
    assert "slow_link" not in causes


def test_a_link_that_is_fast_in_one_step_is_not_slow() -> None:
    world = CASES["slow link"].world
    slow, fast = world.evidence(), replace(world, links=(0.2, 0.2, 0.2)).evidence()
    steps = [
        replace(of_slow, steps=[of_slow.times] * 7 + [of_fast.times])
        for of_slow, of_fast in zip(slow.ranks, fast.ranks, strict=True)
    ]
    evidence = Evidence.of(world.program, steps, slow.facts)
    assert evidence.model.arrivals == slow.model.arrivals
    assert "slow_link" not in [finding.cause for finding in diagnose(evidence).findings]


def test_a_schedule_that_was_searched_for_is_not_replaced() -> None:
    evidence = replace(GOOD, schedule="gpipe").evidence()
    assert "schedule" in [finding.cause for finding in diagnose(evidence).findings]
    searched = replace(evidence.model.schedule, name="auto (greedy)")
    evidence = replace(evidence, model=replace(evidence.model, schedule=searched))
    assert "schedule" not in [finding.cause for finding in diagnose(evidence).findings]


def test_the_model_of_a_step_is_the_step() -> None:
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        world = replace(USUAL, schedule=name, links=(0.5, 3.0, 1.0), loader_ms=(5.0, 0.0, 20.0, 0.0))
        evidence = world.evidence()
        assert evidence.model.step_ms == pytest.approx(evidence.step_ms, rel=0.005)
        assert evidence.model.arrivals.forward == pytest.approx((0.0, 0.5, 3.0, 1.0), abs=0.01)


def test_a_limit_of_memory_is_kept() -> None:
    evidence = replace(USUAL, num_microbatches=8).evidence()
    free = diagnose(evidence).findings
    assert "strategy.schedule=zb_h2" in [finding.override for finding in free]
    assert any("a rank would hold up to 7 microbatches instead of" in finding.text for finding in free)
    limited = replace(evidence, facts=replace(evidence.facts, memory_limit_gib=4.0))
    assert "strategy.schedule=zb_h2" not in [finding.override for finding in diagnose(limited).findings]


def test_steps_with_a_validation_in_between_are_left_out() -> None:
    def of_rank(step_ms: list[float]) -> RankSteps:
        return RankSteps([[]] * len(step_ms), step_ms, [0.0] * 4)

    assert usual_steps([of_rank([10.0, 11.0, 9.0, 10.0]), of_rank([10.0, 11.0, 30.0, 10.0])]) == [0, 1, 3]


def test_a_finding_as_text_and_as_json() -> None:
    finding = Finding(
        "data", "Rank 0 waits.", "4 of them", 31.2, 0.12, "data.num_workers=4", "DataLoader(num_workers=4)"
    )
    assert finding.text == (
        "Rank 0 waits. 4 of them would save 31 ms a step (12%): data.num_workers=4, in Python "
        "DataLoader(num_workers=4)."
    )
    assert finding.to_dict()["text"] == finding.text
    assert Finding(**{k: v for k, v in finding.to_dict().items() if k != "text"}) == finding


def test_the_cut_of_the_emulated_world_is_the_best() -> None:
    program = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    costs = {name: UnitCost(*parts) for name, parts in blocks(4).items()}
    assert [len(units) for units in best_cut(costs, (1.0, 1 / 3), program)] == [3, 1]
