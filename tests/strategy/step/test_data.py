"""The batch that the strategy learns from is still there for training, and all stages draw the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.strategy.batch.cutter import BatchCutter


class Counting(Dataset[Any]):
    """Says which samples were asked for, and draws from every generator as augmentations do."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(index)
        noise = torch.rand(8) + random.random() + float(np.random.rand())
        return noise, noise.sum()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from loader().dataset


class CountsLoaders(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.num_loaders = 0
        self.seen: list[float] = []

    def train_dataloader(self) -> Any:
        self.num_loaders += 1
        return self.make_loader()

    def make_loader(self) -> Any:
        return DataLoader(Counting(), batch_size=4, shuffle=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch[0].sum()))


class StreamsOnce(CountsLoaders):
    def make_loader(self) -> Any:
        return iter(list(DataLoader(Stream(), batch_size=4)))  # can be read once only


class WritesInTransfer(StreamsOnce):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0].mul_(2.0)
        batch.append(0)
        return batch[:2] if len(batch) == 3 else [batch[0] * 0, batch[1]]


def batches_seen(module: type[CountsLoaders], pipelined: bool) -> tuple[list[float], int]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    instance = module()
    torch.manual_seed(4)
    run = trainer() if pipelined else trainer(1, "auto")
    run.fit(instance)
    return instance.seen, instance.num_loaders


@pytest.mark.parametrize("module", [CountsLoaders, StreamsOnce, WritesInTransfer])
def test_looking_at_a_batch_changes_nothing(pool: WorkerPool, module: type[CountsLoaders]) -> None:
    [(expected, num_loaders)] = pool.run(batches_seen, module, False, world_size=1)
    for seen, its_num_loaders in pool.run(batches_seen, module, True, world_size=2):
        assert seen == expected
        assert its_num_loaders == num_loaders == 1


def worker_noise() -> list[float]:
    class Seeded(CountsLoaders):
        def make_loader(self) -> Any:
            return DataLoader(Counting(), batch_size=4, num_workers=1)

    import lightning.pytorch as pl

    pl.seed_everything(5, workers=True)
    module = Seeded()
    trainer().fit(module)
    return module.seen


def test_loader_workers_of_one_pipeline_draw_the_same(pool: WorkerPool) -> None:
    first, second = pool.run(worker_noise, world_size=2)
    assert first == second and len(first) == 2


def test_auto_leaves_batch_norms_two_samples_of_each_microbatch() -> None:
    batch = torch.randn(4, 3)
    auto, four = (PipelineParallelStrategy(2, num_microbatches=number).options for number in ("auto", 4))
    normed = BatchCutter(auto, 2, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    assert [each.num_samples for each in normed.cut(batch, for_training=True)] == [2, 2]
    assert len(normed.cut(batch, for_training=False)) == 4
    assert len(BatchCutter(four, 2, nn.BatchNorm1d(3)).cut(batch, for_training=True)) == 4  # as asked for
    assert len(BatchCutter(auto, 2, nn.LayerNorm(3)).cut(batch, for_training=True)) == 4
