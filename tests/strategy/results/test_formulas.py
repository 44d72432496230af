"""Logged numbers that are made of others: perplexity, a root of a mean square, decibels, F1."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity_run import Layout
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Residual
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_CLASSES = 4


class Logs(Residual):
    """Logs what is made of sums and means over samples; some samples have no label."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=-100)
        self.log("loss", loss)
        self.log("perplexity", torch.exp(loss.detach().clamp(max=20.0)))
        self._log_more(logits.detach(), x, labels)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1], ignore_index=-100)
        self.log_dict({"val_loss": loss, "val_perplexity": loss.exp()})

    def _log_more(self, logits: Tensor, x: Tensor, labels: Tensor) -> None:
        square = nn.functional.mse_loss(logits, x)
        self.log("rmse", square.sqrt())
        self.log("peak", logits.abs().max().sqrt())
        self.log("decibels", 10 * torch.log10(1 / square))
        predicted, actual = logits.argmax(-1) == 1, labels == 1
        hits = (predicted & actual).sum()
        precision, recall = hits / predicted.sum().clamp(min=1), hits / actual.sum().clamp(min=1)
        self.log("f1", 2 * precision * recall / (precision + recall + 1e-9))
        norms = (logits.square().sum() / len(x)) ** 0.5
        norms += 1.0
        self.log("norm", norms.sqrt())


class LogsNumbers(Logs):
    """Python makes the root, which nobody can follow."""

    def _log_more(self, logits: Tensor, x: Tensor, labels: Tensor) -> None:
        self.log("rmse", nn.functional.mse_loss(logits, x).item() ** 0.5)


class Logged(pl.Callback):
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Data(pl.LightningDataModule):
    """Batches of 16 samples of all replicas together, in order."""

    def train_dataloader(self, seed: int = 2) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(32, 8, generator=generator)
        labels = torch.randint(NUM_CLASSES, (32,), generator=generator)
        labels[torch.rand(32, generator=generator) < 0.3] = -100
        data, shares = TensorDataset(x, labels), self.trainer.distributed_sampler_kwargs
        sampler = DistributedSampler(data, shuffle=False, **(shares or {"num_replicas": 1, "rank": 0}))
        return DataLoader(data, batch_size=16 // sampler.num_replicas, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader(seed=3)


def train(kind: type[Logs], layout: Layout | None) -> tuple[list[dict[str, float]], list[str]]:
    """In a worker: what is logged after each batch and in the end, and warnings about it."""
    logged = Logged()
    options: dict[str, Any] = {
        "precision": "64-true", "callbacks": [logged], "max_epochs": 2, "use_distributed_sampler": False,
    }  # fmt: skip
    run = trainer(1, "auto", **options) if layout is None else trainer(layout.world_size, layout.strategy(), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(kind(), datamodule=Data())
    last = {name: float(value) for name, value in run.callback_metrics.items()}
    return [*logged.values, last], [str(each.message) for each in caught if "logs as" in str(each.message)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [Layout("1f1b", 2, num_microbatches=4), Layout("zb_v", 2, 2, 2)], ids=str)
def test_are_computed_of_those_of_the_batch(pool: WorkerPool, layout: Layout) -> None:
    expected, _ = pool.run(train, Logs, None, world_size=1, timeout=60)[0]
    for values, told in pool.run(train, Logs, layout, world_size=layout.world_size, timeout=90):
        assert all("'norm'" in each for each in told), told
        for mine, others in zip(expected, values, strict=True):
            assert mine.keys() == others.keys()
            for name in mine.keys() - {"norm"}:
                assert others[name] == pytest.approx(mine[name], rel=1e-9), name


def test_a_number_that_python_made_is_told(pool: WorkerPool) -> None:
    layout = Layout("1f1b", 2, num_microbatches=4)
    (_, told), _ = pool.run(train, LogsNumbers, layout, world_size=2, timeout=60)
    assert [each for each in told if "'rmse'" in each], told
