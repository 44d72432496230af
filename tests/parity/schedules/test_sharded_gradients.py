"""Gradients of sharded pipelines equal those of one device, in float64 to 1e-9.

The default run has every setting in one case (each schedule, each mode, each mesh, and so on); ``--nightly`` runs the
product.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from pool import WorkerPool
from sharded_gradients import Case, largest_error, largest_errors

from lightning_pp.schedule import available_schedules

TOLERANCE = 1e-9
SCHEDULES = [name for name in available_schedules() if name != "auto"]
MODES = [("replicate", None), ("shard_grad_op", None), ("full_shard", None), ("full_shard", 2)]
MESHES = [(2, 2), (1, 4), (4, 1)]
CASES_PER_RUN = 4

PRODUCT = [
    Case(schedule, mode, pipeline, replicas, budget=budget, checkpointing=checkpointing, accumulate=accumulate)
    for (pipeline, replicas), schedule, (mode, budget), checkpointing, accumulate in product(
        MESHES, SCHEDULES, MODES, ("", "units"), (1, 3)
    )
]
HSDP = [
    Case(schedule, mode, pipeline, replicas, 2, budget, checkpointing, accumulate)
    for (pipeline, replicas), schedule, (mode, budget), checkpointing, accumulate in product(
        [(1, 4), (2, 2)], SCHEDULES, MODES[1:], ("", "inside"), (1, 3)
    )
]
VARIANTS = [
    Case(schedule, mode, pipeline, replicas, replicate, budget, accumulate=2, variant=variant)
    for (pipeline, replicas, replicate), schedule, (mode, budget), variant in product(
        [(2, 2, 1), (1, 4, 1), (1, 4, 2)],
        ("1f1b", "interleaved_1f1b", "zb_v"),
        MODES,
        ("tied", "frozen", "adapters", "regions", "bare"),
    )
    if mode != "replicate" or replicate == 1
]
RAGGED = [
    Case(schedule, mode, 2, 2, budget=budget, accumulate=accumulate, ragged=True)
    for schedule, (mode, budget), accumulate in product(("zb_h1", "interleaved_zb", "zb_v"), MODES, (1, 2))
]
OFFLOADED = [
    Case(schedule, mode, pipeline, replicas, replicate, budget, checkpointing, accumulate, variant, offload=True)
    for (pipeline, replicas, replicate), (schedule, mode, budget, checkpointing, accumulate, variant) in product(
        [(2, 2, 1), (4, 1, 1), (1, 4, 2)],
        [
            ("zb_v", "shard_grad_op", None, "", 1, ""),
            ("1f1b", "full_shard", 2, "units", 3, ""),
            ("interleaved_zb", "full_shard", None, "", 2, "tied"),
            ("zb_h1", "full_shard", 2, "", 1, "frozen"),
        ],
    )
]
ALL = [*PRODUCT, *HSDP, *VARIANTS, *RAGGED, *OFFLOADED]


# cases that have something in common, and the attributes of which one of them has every value
GROUPS: list[tuple[list[Case], tuple[str, ...]]] = [
    (PRODUCT, ("schedule", "sharding", "budget", "pipeline", "checkpointing", "accumulate")),
    (HSDP, ("sharding", "budget", "pipeline", "checkpointing", "accumulate")),
    (VARIANTS, ("variant", "sharding", "pipeline")),
    (RAGGED, ("sharding", "budget", "accumulate")),
]


def _values(case: Case) -> set[Any]:
    """The values of the case, for each group that it is in; all cases count in the first."""
    return {
        (number, name, getattr(case, name))
        for number, (members, attributes) in enumerate(GROUPS)
        if number == 0 or case in members
        for name in attributes
    }


def covering(chosen: list[Case]) -> list[Case]:
    """``chosen`` and few more, in which a group has every value that its cases have."""
    # of equally good cases one with several stages; the last groups come first, since their cases count in two groups
    values = {case: _values(case) for members, _ in reversed(GROUPS) for case in members}
    wanted = {
        value
        for number, (members, _) in enumerate(GROUPS)
        for case in members
        for value in values[case]
        if value[0] == number
    }
    wanted -= set().union(*map(_values, chosen))
    while wanted:
        best = max(values, key=lambda case: (len(wanted & values[case]), case.pipeline > 1))
        chosen = [*chosen, best]
        wanted -= values[best]
    return chosen


COVERING = covering(OFFLOADED[1:8:2])


def runs_of(cases: list[Case]) -> list[list[Case]]:
    return [cases[start : start + CASES_PER_RUN] for start in range(0, len(cases), CASES_PER_RUN)]


def check(pool: WorkerPool, cases: list[Case]) -> None:
    for errors in pool.run(largest_errors, cases, world_size=4, timeout=600):
        assert {case: error for case, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("cases", runs_of(COVERING[2:] + COVERING[:2]), ids=lambda cases: str(cases[0]))
def test_gradients_equal_one_device(pool: WorkerPool, cases: list[Case]) -> None:
    check(pool, cases)


def test_unforeseen_gathers_of_uneven_replicas_are_refused(pool: WorkerPool) -> None:
    """They would wait for each other for ever."""
    case = Case("zb_h1", "full_shard", 2, 2, budget=2, variant="regions", ragged=True)
    report = pool.run(largest_error, case, world_size=4, timeout=60, expect_failure=True)
    messages = [failure.message for failure in report.failures if failure is not None]
    assert any("used out of its stage's order of calls" in message for message in messages)
    assert report.seconds < 50


@pytest.mark.nightly
@pytest.mark.parametrize("cases", runs_of(ALL), ids=lambda cases: str(cases[0]))
def test_product(pool: WorkerPool, cases: list[Case]) -> None:
    check(pool, cases)
