"""Gradients of every schedule are those of one device, in float64 to 1e-9, where nothing divides anything.

Seven samples of a replica in microbatches of unequal size, numbers of microbatches that the ranks do not divide, then a
batch of four samples, which may have fewer microbatches. By default every schedule once, and each placement on two,
three and four ranks and with sharding; ``--nightly`` runs every schedule everywhere.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from gradient_run import Gradients, largest_difference, record_gradients, record_pipelined
from pool import WorkerPool

from lightning_pp.schedule import available_schedules, build_schedule

TOLERANCE = 1e-9
BATCH = 7
ALL = available_schedules()
BY_HAND = tuple(name for name in ALL if name != "auto")

# pipeline ranks, replicas, microbatches; schedules
COVERING = [
    (2, 1, 3, ("gpipe", "1f1b", "zb_h1", "v_half", "v_min", "dualpipe_v")),
    (2, 2, 3, ("interleaved_zb", "zb_h1")),
    (3, 1, 4, ("zb_h2", "interleaved_1f1b")),
    (4, 1, 6, ("zb_v",)),
]
# each placement with schedules that split the backward, and a schedule that does not; by day the first
SUMS: list[Any] = [
    (2, 1, 3, ("zb_v",)),
    pytest.param((2, 1, 3, ("zb_h1", "1f1b")), marks=pytest.mark.nightly),
    pytest.param((2, 1, 5, ("v_half", "interleaved_zb")), marks=pytest.mark.nightly),
    (2, 2, 3, ("zb_v",)),
    (4, 1, 6, ("zb_h2",)),
    *(pytest.param((ranks, 1, 6, BY_HAND), marks=pytest.mark.nightly) for ranks in (3, 4)),
]
EVERYWHERE = [
    (pipeline, replicas, m, (*ALL, "csv"))
    for pipeline, replicas, numbers in ((2, 1, (1, 5)), (2, 2, (3, 5)), (3, 1, (2, 4, 7)), (4, 1, (3, 6, 7)))
    for m in numbers
]


@functools.cache
def expected(
    num_replicas: int, num_blocks: int, num_batches: int, accumulate: int = 1, sums: bool = False
) -> list[Gradients]:
    return record_gradients(
        None,
        1,
        num_blocks=num_blocks,
        batch_size=BATCH * num_replicas,
        num_batches=num_batches,
        accumulate=accumulate,
        sums=sums,
    ).steps


def options_of(schedule: str, pipeline: int, m: int, folder: Path) -> dict[str, Any]:
    """Strategy arguments; the CSV is of a V with its last stage on rank 0, ``auto`` changes its schedule on the way."""
    if schedule == "csv":
        path = folder / f"{pipeline}x{m}.csv"
        build_schedule("zb_v", num_ranks=pipeline, num_microbatches=m).to_csv(path)
        return {"schedule": str(path)}
    if schedule == "auto":
        return {"schedule": "auto", "num_microbatches": m, "num_profiled_batches": 1}
    return {"schedule": schedule, "num_microbatches": m}


def check(
    pool: WorkerPool,
    folder: Path,
    pipeline: int,
    replicas: int,
    m: int,
    schedules: tuple[str, ...],
    num_batches: int = 2,
    **run: Any,
) -> None:
    options = {name: options_of(name, pipeline, m, folder) for name in schedules}
    num_blocks = 2 * pipeline  # with embedding and head, units for two stages a rank
    ranks = pool.run(
        record_pipelined,
        options,
        pipeline,
        replicas,
        world_size=pipeline * replicas,
        timeout=240,
        num_blocks=num_blocks,
        batch_size=BATCH * replicas,
        num_batches=num_batches,
        **run,
    )
    for name in schedules:
        found = [rank[name] for rank in ranks]
        difference = largest_difference(found, expected(replicas, num_blocks, num_batches, **run))
        assert difference < TOLERANCE, f"{name} on {pipeline}x{replicas} ranks, {m} microbatches: {difference:.1e}"


def _id(case: tuple[int, int, int, tuple[str, ...]]) -> str:
    return f"{case[0]}x{case[1]}-m{case[2]}"


@pytest.mark.by_day(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", COVERING, ids=_id)
def test_gradients_of_schedules(pool: WorkerPool, tmp_path: Path, case: tuple[int, int, int, tuple[str, ...]]) -> None:
    check(pool, tmp_path, *case)


@pytest.mark.by_day(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SUMS, ids=_id)
def test_gradients_where_sums_between_units_cross(
    pool: WorkerPool, tmp_path: Path, case: tuple[int, int, int, tuple[str, ...]]
) -> None:
    check(pool, tmp_path, *case, sums=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sizes", "accumulation"),
    [
        ((2, 1, 3), {"accumulate": 2}),
        *(pytest.param(sizes, {}, marks=pytest.mark.nightly) for sizes in ((2, 1, 3), (2, 2, 3), (3, 1, 4))),
    ],
)
def test_gradients_over_a_change_of_schedule(
    pool: WorkerPool, tmp_path: Path, sizes: tuple[int, int, int], accumulation: dict[str, int]
) -> None:
    """``auto`` warms up with two batches, measures one and runs the fourth as searched for."""
    check(pool, tmp_path, *sizes, ("auto", "csv"), num_batches=4, **accumulation)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", EVERYWHERE, ids=_id)
def test_gradients_of_every_schedule_everywhere(
    pool: WorkerPool, tmp_path: Path, case: tuple[int, int, int, tuple[str, ...]]
) -> None:
    check(pool, tmp_path, *case, num_batches=4)
