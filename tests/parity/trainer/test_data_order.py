"""The data come in the order of one device: the same seed gives the same batches, whatever the loader draws from."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from loader_kinds import BATCH_SIZE, LOADERS, Recorder, Samples
from parity_run import QUIET, Layout
from pool import WorkerPool
from torch.utils.data import DataLoader

TWO_STAGES = Layout(num_microbatches=2)
Options = dict[str, Any]


def seen(kind: str, layout: Layout | None, options: Options, *, num_replicas: int = 1, val: str = "") -> Any:
    """Batches and losses of two epochs; with replicas and no layout, of DDP."""
    L.seed_everything(3, workers=True, verbose=False)
    torch.rand(5)  # the script has drawn before the trainer sets the processes up
    module = Recorder(**options)
    where: Options = {"devices": 1}
    if layout is not None:
        strategy = layout.strategy(check_first_batches=kind == "shuffle")
        where = {"devices": layout.world_size, "strategy": strategy}
    elif num_replicas > 1:
        where = {"devices": num_replicas, "strategy": DDPStrategy()}
    loader = LOADERS[kind]()
    of_val = {"": None, "shuffled": DataLoader(Samples(), BATCH_SIZE, shuffle=True), "the same": loader}[val]
    trainer = L.Trainer(**QUIET, **where, max_epochs=2)
    trainer.fit(module, loader, of_val)
    return module.seen


def check_equals_one_device(pool: WorkerPool, kind: str, options: Options, val: str = "") -> None:
    (expected,) = pool.run(seen, kind, None, options, val=val, world_size=1)
    for found in pool.run(seen, kind, TWO_STAGES, options, val=val, world_size=2):
        assert [batch for batch, _ in found] == [batch for batch, _ in expected]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-9)
    assert len(expected) >= 6


@pytest.mark.by_day(4)
@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_of_loader(pool: WorkerPool, kind: str) -> None:
    check_equals_one_device(pool, kind, {})


@pytest.mark.by_day(1)
@pytest.mark.parametrize("val", ["shuffled", "the same"])
@pytest.mark.parametrize("kind", ["shuffle", "dataset that counts", "workers"])
def test_with_validation_before_and_between(pool: WorkerPool, kind: str, val: str) -> None:
    check_equals_one_device(pool, kind, {}, val)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("kind", ["shuffle", "dataset with a generator"])
@pytest.mark.parametrize("draws", ["before", "after"])
def test_hooks_that_draw_before_the_first_batch(pool: WorkerPool, kind: str, draws: str) -> None:
    check_equals_one_device(pool, kind, {"draws": draws})


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["shuffle", "dataset that counts"])
def test_the_number_of_steps_asked_for_in_configure_optimizers(pool: WorkerPool, kind: str) -> None:
    check_equals_one_device(pool, kind, {"asks_for_steps": True})


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["shuffle", "dataset with a generator", "stream"])
def test_replicas_have_the_order_of_ddp(pool: WorkerPool, kind: str) -> None:
    expected = pool.run(seen, kind, None, {}, num_replicas=2, world_size=2)
    found = pool.run(seen, kind, Layout(replicas=2, num_microbatches=2), {}, world_size=4)
    for rank, of_rank in enumerate(found):
        # the mesh is pipeline × data-parallel: ranks of one replica are every second one
        assert [batch for batch, _ in of_rank] == [batch for batch, _ in expected[rank % 2]]


def unseeded(layout: Layout) -> Any:
    """What each process has drawn before is its own; all train on what the first one reads."""
    torch.seed()
    module = Recorder()
    torch.manual_seed(int(torch.randint(1 << 30, ())))
    trainer = L.Trainer(**QUIET, devices=layout.world_size, strategy=layout.strategy(), max_epochs=2)
    trainer.fit(module, DataLoader(Samples(), BATCH_SIZE, shuffle=True))
    return [batch for batch, _ in module.seen]


def test_without_a_seed_all_ranks_have_the_order_of_the_first(pool: WorkerPool) -> None:
    first, second = pool.run(unseeded, TWO_STAGES, world_size=2)
    assert first == second and len(first) == 6


def drawn_after_no_step(kind: str, layout: Layout | None) -> Any:
    """What the generators give after a fit that was to train nothing."""
    L.seed_everything(0, verbose=False)
    where = {"devices": 1} if layout is None else {"devices": 2, "strategy": layout.strategy()}
    trainer = L.Trainer(**QUIET, **where, max_steps=0)
    loader = LOADERS[kind]()
    trainer.fit(Recorder(), loader)
    return torch.rand(3).tolist(), [batch.tolist() for batch in loader]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["shuffle", "dataset with a generator", "workers"])
def test_the_look_at_the_first_batch_leaves_no_trace(pool: WorkerPool, kind: str) -> None:
    (expected,) = pool.run(drawn_after_no_step, kind, None, world_size=1)
    assert pool.run(drawn_after_no_step, kind, TWO_STAGES, world_size=2) == [expected, expected]
