"""Loaders of many kinds, each with a place of its own from which random numbers or positions come."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

NUM_BATCHES, BATCH_SIZE = 3, 4
NUM_SAMPLES = NUM_BATCHES * BATCH_SIZE


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.sample(float(index))

    def sample(self, number: float) -> Tensor:
        return torch.full((4,), number, dtype=torch.float64)


class OwnGenerator(Samples):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Tensor:
        return self.sample(index + float(self.generator.random()))


class Counting(Samples):
    def __init__(self) -> None:
        self.num_reads = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_reads += 1
        return self.sample(index + self.num_reads / 1000)


class GlobalGenerators(Samples):
    def __getitem__(self, index: int) -> Tensor:
        return self.sample(index + random.random() + float(np.random.rand()) + float(torch.rand(())))


class Stream(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)

    def __iter__(self) -> Iterator[Tensor]:
        for index in self.generator.permutation(NUM_SAMPLES):
            yield torch.full((4,), float(index), dtype=torch.float64)


class Batches:
    """No loader of torch's, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(3)

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(NUM_BATCHES):
            yield torch.full((BATCH_SIZE, 4), self.generator.random(), dtype=torch.float64)

    def __len__(self) -> int:
        return NUM_BATCHES


class OwnOrder(Sampler[int]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(NUM_SAMPLES).tolist())

    def __len__(self) -> int:
        return NUM_SAMPLES


class OwnBatches(Sampler[list[int]]):
    def __init__(self) -> None:
        self.generator = random.Random(2)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(NUM_BATCHES):
            yield [self.generator.randrange(NUM_SAMPLES) for _ in range(BATCH_SIZE)]

    def __len__(self) -> int:
        return NUM_BATCHES


def drawn_batches() -> Iterator[Tensor]:
    for _ in range(2 * NUM_BATCHES):
        yield torch.full((BATCH_SIZE, 4), random.random(), dtype=torch.float64)


def noisy(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + torch.rand((), dtype=torch.float64)


def _loader(samples: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples, BATCH_SIZE, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: _loader(Samples(), shuffle=True),
    "own generator": lambda: _loader(Samples(), shuffle=True, generator=torch.Generator().manual_seed(7)),
    "dataset with a generator": lambda: _loader(OwnGenerator(), shuffle=True),
    "dataset within a dataset": lambda: _loader(Subset(OwnGenerator(), range(NUM_SAMPLES)), shuffle=True),
    "dataset that counts": lambda: _loader(Counting(), shuffle=True),
    "global generators": lambda: _loader(GlobalGenerators(), shuffle=True),
    "collate_fn that draws": lambda: _loader(Samples(), shuffle=True, collate_fn=noisy),
    "own sampler": lambda: _loader(Samples(), sampler=OwnOrder()),
    "own batch sampler": lambda: DataLoader(Samples(), batch_sampler=OwnBatches()),
    "stream": lambda: _loader(Stream()),
    "workers": lambda: _loader(GlobalGenerators(), shuffle=True, num_workers=2),
    "persistent worker": lambda: _loader(OwnGenerator(), shuffle=True, num_workers=1, persistent_workers=True),
    "stream with a worker": lambda: _loader(Stream(), num_workers=1),
    "own iterable": Batches,
    "iterator": drawn_batches,
    "two loaders": lambda: {"a": _loader(Samples(), shuffle=True), "b": _loader(OwnGenerator(), shuffle=True)},
}


class Recorder(L.LightningModule):
    """Notes the numbers of the batches that it is trained on, and its losses.

    Args:
        draws: When hooks draw from the global generators: ``"never"``, before or after loaders are begun.
        asks_for_steps: Whether ``configure_optimizers`` asks for the number of steps, which makes the loaders.
    """

    def __init__(self, draws: str = "never", *, asks_for_steps: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.draws, self.asks_for_steps = draws, asks_for_steps
        self.seen: list[Any] = []

    def on_fit_start(self) -> None:
        if self.draws == "before":
            torch.rand(3)

    def on_train_start(self) -> None:
        if self.draws == "after":
            torch.rand(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = sum(batch.values()) if isinstance(batch, dict) else batch
        return self.layers(x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layers(batch).mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        x = sum(batch.values()) if isinstance(batch, dict) else batch
        self.seen.append([x[:, 0].tolist(), float(outputs["loss"])])

    def configure_optimizers(self) -> Any:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), 1e-3)
