"""Losses over the whole batch, as on one device: in every schedule, with what a trainer does besides, and refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from feature_parts import assert_equal_trees
from parity_run import Layout, tensor_difference
from pool import WorkerPool
from whole_batch_parts import LOSSES, WholeBatchModel, run_whole

from lightning_pp.schedule import available_schedules

EVERY_SCHEDULE = sorted(available_schedules())
# every loss, in schedules that split backward, put the last stage on rank 0, and interleave
COVERING = [
    ("contrastive", Layout("1f1b", 2, 1, 3)),
    ("nt_xent", Layout("zb_v", 2, 1, 3)),
    ("root_of_mean", Layout("zb_h1", 2, 1, 4)),
    ("batch_hard", Layout("interleaved_zb", 2, 1, 4)),
    ("dice", Layout("gpipe", 3, 1, 3)),
    ("temperature", Layout("zb_v", 3, 1, 3)),
    ("tied", Layout("zb_h2", 3, 1, 3)),
    ("loss_module", Layout("zb_h1", 2, 1, 3)),
    ("loss_module", Layout("dualpipe_v", 2, 1, 4)),
    ("values_of_earlier_stages", Layout("zb_h1", 3, 1, 3)),
    ("contrastive", Layout("1f1b", 1, 1, 3)),
    ("nt_xent", Layout("1f1b", 1, 1, 1)),
]


@functools.cache
def on_one_device(loss: str, make: Any = WholeBatchModel, **kwargs: Any) -> dict[str, Any]:
    return run_whole(None, loss, make, data=dict(kwargs.pop("data", ())), **kwargs)


def check(
    pool: WorkerPool, loss: str, layout: Layout, make: Any = WholeBatchModel, arguments: Any = None, **kwargs: Any
) -> None:
    """Every rank saw the losses, logs and attributes of one device, and has its weights."""
    expected = on_one_device(loss, make, **kwargs)
    data = dict(kwargs.pop("data", ()))
    results = pool.run(
        run_whole, layout, loss, make, arguments, data, world_size=layout.world_size, timeout=120, **kwargs
    )
    found_weights = set()
    for rank, found in enumerate(results):
        for name in ("batches", "end", "seen"):
            assert_equal_trees(found[name], expected[name], path=f"rank {rank} {name}")
        for name, value in found["weights"].items():
            assert tensor_difference(value, expected["weights"][name]) < 1e-9, (rank, name)
        found_weights |= found["weights"].keys()
    assert found_weights == expected["weights"].keys()


@pytest.mark.parametrize(("loss", "layout"), COVERING, ids=str)
def test_like_one_device(pool: WorkerPool, loss: str, layout: Layout) -> None:
    check(pool, loss, layout)


@pytest.mark.nightly
@pytest.mark.parametrize("pipeline", [2, 3])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_every_loss_in_every_schedule(pool: WorkerPool, schedule: str, loss: str, pipeline: int) -> None:
    check(pool, loss, Layout(schedule, pipeline, 1, 6))
