"""Replicas whose batches have them call different units: none waits for the others, and gradients are those of all."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from parity_run import QUIET, tensor_difference, whole_weights
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy

NUM_BATCHES = 8


class DepthOfBatch(Classifier):
    """The batch says how many of the layers are called."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, label = batch
        layers = list(self.layers)
        for layer in layers if x[0, 0] > 0 else [*layers[:2], layers[-1]]:
            x = layer(x)
        return F.cross_entropy(x, label)


class UsesAWeight(DepthOfBatch):
    """From the fifth batch on a weight is used after the last unit, and each replica may keep a shard of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, label = batch
        loss = F.cross_entropy(self.layers(x).mean(1), label)
        if self.global_step > 3:
            loss = loss + 0.01 * self.layers[-1].weight.square().sum()
        return loss


class Samples:
    """A batch that is no container: it keeps its tensors in attributes."""

    def __init__(self, x: Tensor, label: Tensor) -> None:
        self.x, self.label = x, label

    def to(self, device: Any, **options: Any) -> Samples:
        return Samples(self.x.to(device, **options), self.label.to(device, **options))


class ReadsAnObject(Classifier):
    """Of an object, or of a list with the objects of all replicas."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, list) else [batch]
        x, label = torch.cat([part.x for part in parts]), torch.cat([part.label for part in parts])
        loss = F.mse_loss(self.layers(x)[:, 0], label.double())
        self.log("train_loss", loss, batch_size=len(x), on_step=False, on_epoch=True)
        return loss


def train_on_objects(devices: int) -> tuple[float, dict[str, Tensor]]:
    """Replicas of 3 and 5 samples, or one device on all 8."""
    generator = torch.Generator().manual_seed(5)
    sizes, data = (3, 5, 5, 3, 2, 6), []
    for size in sizes:
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        data.append(Samples(x, torch.randint(0, 3, (size,), generator=generator)))
    strategy: Any = "auto"
    if devices > 1:
        strategy = PipelineParallelStrategy(2, data_parallel_size=2, num_microbatches=1)
    options: dict[str, Any] = {**QUIET, "devices": devices, "strategy": strategy, "precision": "64-true"}
    trainer = L.Trainer(**options, max_epochs=1, use_distributed_sampler=False)
    torch.manual_seed(0)
    module = ReadsAnObject()
    pairs: list[Any] = [list(pair) for pair in zip(data[::2], data[1::2], strict=True)]
    if devices > 1:
        pairs = [pair[strategy.data_parallel_rank] for pair in pairs]
    trainer.fit(module, DataLoader(pairs, batch_size=None))  # type: ignore[arg-type]
    return float(trainer.callback_metrics["train_loss"]), whole_weights(module)


def test_objects_weigh_by_their_rows(pool: WorkerPool) -> None:
    loss, expected = train_on_objects(1)
    for found, weights in pool.run(train_on_objects, 4, world_size=4, timeout=60):
        assert found == pytest.approx(loss, rel=1e-9)
        for name, value in weights.items():
            assert tensor_difference(value, expected[name]) < 1e-9, name


def sequences() -> list[Any]:
    """From the fifth batch on those of the second replica are longer, so it rehearses other steps than the first."""
    generator = torch.Generator().manual_seed(4)
    lengths = [2, 2, 3, 3, 2, 2, 3, 3, 2, 4, 3, 5, 2, 6, 3, 7]
    data = [torch.randn(4, length, 6, generator=generator) for length in lengths]
    return [(x, torch.randint(0, 3, (4,), generator=generator)) for x in data]


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(NUM_BATCHES):
        x = torch.randn(4, 6, generator=generator)
        x[:, 0] = 1.0 if index % 4 in (1, 2) else -1.0  # one of each two batches is deep, first the second
        made.append((x, torch.randint(0, 3, (4,), generator=generator)))
    return made


def train(kind: type[DepthOfBatch], sharding: str | None = None) -> dict[str, Tensor]:
    """Two replicas, or one device that accumulates what they read."""
    data, strategy = batches() if kind is DepthOfBatch else sequences(), None
    if sharding is not None:
        strategy = PipelineParallelStrategy(
            2, data_parallel_size=2, num_microbatches=2, sharding=sharding, check_first_batches=False
        )
    trainer = L.Trainer(
        **QUIET,
        devices=4 if strategy else 1,
        strategy=strategy or "auto",
        accumulate_grad_batches=1 if strategy else 2,
        max_epochs=1,
        precision="64-true",
        use_distributed_sampler=False,
    )
    torch.manual_seed(0)
    module = kind()
    mine = data[trainer.strategy.data_parallel_rank :: 2] if isinstance(trainer.strategy, type(strategy)) else data
    trainer.fit(module, DataLoader(mine, batch_size=None))  # type: ignore[arg-type]
    return whole_weights(module)


def check(pool: WorkerPool, kind: type[DepthOfBatch], sharding: str) -> None:
    expected = train(kind)
    weights: dict[str, Tensor] = {}
    for found in pool.run(train, kind, sharding, world_size=4, timeout=60):
        for name, value in found.items():
            assert tensor_difference(value, expected[name]) < 1e-9, name
        weights |= found
    assert sorted(weights) == sorted(expected)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op", "replicate"])
def test_gradients_are_those_of_all_replicas(pool: WorkerPool, sharding: str) -> None:
    check(pool, DepthOfBatch, sharding)


def test_a_rehearsal_of_one_replica_waits_for_no_other(pool: WorkerPool) -> None:
    check(pool, UsesAWeight, "full_shard")
