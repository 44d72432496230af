"""A training that goes on in the middle of an epoch has the batches, draws and weights of one that did not stop."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import CheckpointError

WIDTH, NUM_SAMPLES, BATCH_SIZE, EPOCHS = 4, 16, 4, 2
BATCHES_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE


class Augmented(Dataset[Tensor]):
    """Samples with noise from the generators of torch, NumPy and Python, and from some of its own.

    A generator of torch cannot be sent to a worker.
    """

    def __init__(self, num_workers: int) -> None:
        self.own = np.random.default_rng(5)
        self.generator = None if num_workers else torch.Generator().manual_seed(6)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        noise = [float(torch.rand(())), np.random.rand(), random.random() + self.own.random()]
        return torch.tensor([float(index), *noise]) + 0.01 * torch.rand((), generator=self.generator)


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((WIDTH,), float(number)) for number in range(NUM_SAMPLES))


class Batches(Sequence[Tensor]):
    def __init__(self, batches: Iterable[Tensor]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        return self.batches[index]


def make_data(kind: str, num_workers: int) -> Any:
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": num_workers}
    if kind == "stream":
        return DataLoader(Numbers(), **options)
    if kind == "list":
        return Batches(DataLoader(Numbers(), **options))
    dataset = Augmented(num_workers)
    if kind == "own generator":
        options["generator"] = torch.Generator().manual_seed(7)
    if kind == "distributed":
        return DataLoader(dataset, sampler=DistributedSampler(dataset, 1, 0, shuffle=True), **options)
    if kind == "drawn with replacement":
        return DataLoader(dataset, sampler=RandomSampler(dataset, replacement=True), **options)
    if kind == "two":
        return [
            DataLoader(dataset, shuffle=True, **options),
            DataLoader(Augmented(num_workers), shuffle=True, **options),
        ]
    return DataLoader(dataset, shuffle=True, **options)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 8)
        self.second = nn.Linear(8, 1)
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batches = batch if isinstance(batch, list) else [batch]
        drawn = [random.random(), torch.rand(()).item()]
        self.seen.append([batch_idx, [each.tolist() for each in batches], drawn])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = sum(batch) if isinstance(batch, list) else batch
        return self.second(nn.functional.dropout(torch.tanh(self.first(x)), 0.3)).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(folder: Path, kind: str, num_workers: int, ckpt: str | None = None, **options: Any) -> tuple[Any, Any]:
    pl.seed_everything(3, workers=True, verbose=False)
    replicas = options.pop("replicas", 1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineParallelStrategy(2 // replicas, replicas, 2, schedule="1f1b", check_first_batches=False),
        logger=False,
        enable_checkpointing=ckpt is None,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if ckpt else [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
        **{"max_epochs": EPOCHS, **options},
    )
    module = Module()
    ckpt_path = None if ckpt is None else folder / ckpt
    trainer.fit(module, make_data(kind, num_workers), ckpt_path=ckpt_path)
    trainer.strategy.gather_module()  # type: ignore[attr-defined]
    return module.seen, {name: value.tolist() for name, value in module.state_dict().items()}


def undisturbed_and_resumed(folder: Path, kind: str, num_workers: int, steps: list[int], **options: Any) -> list[Any]:
    results = [fit(folder, kind, num_workers, **options)]
    return results + [fit(folder, kind, num_workers, f"step={step}.ckpt", **options) for step in steps]


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        ("shuffled", 0),
        pytest.param("shuffled", 2, marks=pytest.mark.nightly),
        pytest.param("own generator", 0, marks=pytest.mark.nightly),
        pytest.param("two", 0, marks=pytest.mark.nightly),
        pytest.param("distributed", 0, marks=pytest.mark.nightly),
        pytest.param("drawn with replacement", 0, marks=pytest.mark.nightly),
        pytest.param("list", 0, marks=pytest.mark.nightly),
    ],
)
def test_batches_and_draws_go_on_within_an_epoch(pool: WorkerPool, tmp_path: Path, kind: str, num_workers: int) -> None:
    steps = [BATCHES_PER_EPOCH + 3] if num_workers else [2, BATCHES_PER_EPOCH, BATCHES_PER_EPOCH + 3]
    told = pool.run(undisturbed_and_resumed, tmp_path, kind, num_workers, steps, world_size=2, timeout=200)
    for results in told:
        (seen, weights), *resumed = results
        assert len(seen) == EPOCHS * BATCHES_PER_EPOCH
        for step, (seen_again, weights_again) in zip(steps, resumed, strict=True):
            assert seen_again == seen[step:], f"after step {step}"
            assert weights_again == weights, f"after step {step}"


def test_replicas_and_max_steps(pool: WorkerPool, tmp_path: Path) -> None:
    """Each replica goes on with its own part; with max_steps Lightning counts a finished epoch otherwise."""
    options = {"replicas": 2, "max_epochs": -1, "max_steps": 5}
    steps = [2, 3]
    results = pool.run(undisturbed_and_resumed, tmp_path, "shuffled", 0, steps, world_size=2, **options)
    assert results[0][0][0] != results[1][0][0]
    for (seen, weights), *resumed in results:
        for step, (seen_again, weights_again) in zip(steps, resumed, strict=True):
            assert seen_again == seen[step:], f"after step {step}"
            assert weights_again == weights, f"after step {step}"


def refused(folder: Path, step: int) -> str:
    try:
        fit(folder, "stream", 0, f"step={step}.ckpt")
    except CheckpointError as error:
        return str(error)
    return "went on"


def test_a_stream_without_a_state_is_refused_within_an_epoch_alone(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(fit, tmp_path, "stream", 0, world_size=2)
    for told in pool.run(refused, tmp_path, BATCHES_PER_EPOCH + 2, world_size=2):
        assert "after 2 batches of epoch 1" in told and "Numbers" in told and "state_dict" in told
    assert pool.run(refused, tmp_path, BATCHES_PER_EPOCH, world_size=2) == ["went on"] * 2
