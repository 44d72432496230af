"""Metrics of torchmetrics whose value a step trains through, or whose state hooks ask for, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feature_parts import check_on_every_rank, make_trainer, plain
from parity_run import Layout
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection

LAYOUTS = [Layout("1f1b", 2, 1, 2), Layout("zb_h1", 3, 1, 4)]


class TrainsThroughMetric(Blocks):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.criterion = {"mse": MeanSquaredError, "mae": MeanAbsoluteError}[kind]().set_dtype(torch.float64)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.criterion.compute()))
        self.criterion.reset()


def trained_through(layout: Layout | None, kind: str) -> Any:
    module = TrainsThroughMetric(kind)
    trainer = make_trainer(layout)
    trainer.fit(module, loader())
    return module.seen, plain(dict(trainer.callback_metrics))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["mse", "mae"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_loss_is_what_a_metric_returns(pool: WorkerPool, layout: Layout, kind: str) -> None:
    losses, _ = check_on_every_rank(pool, trained_through, layout, kind)
    assert losses[-1] < losses[0]


class AsksWhetherUpdated(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = (MeanMetric().set_dtype(torch.float64) for _ in range(3))
        self.both = MetricCollection({"a": MeanSquaredError(), "b": MeanAbsoluteError()}).set_dtype(torch.float64)
        self.notes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.first.update(loss.detach())
        if batch_idx == 1:
            self.second(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.both.update(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes.append([metric.update_called for metric in (self.first, self.second, self.never)])

    def on_train_epoch_end(self) -> None:
        self.log_computed({"first": self.first, "second": self.second, "never": self.never})

    def on_validation_epoch_end(self) -> None:
        self.log_computed(dict(self.both.items()))

    def log_computed(self, metrics: dict[str, Any]) -> None:
        for name, metric in metrics.items():
            if metric.update_called:
                self.log(name, metric.compute())
                metric.reset()


def asked(layout: Layout | None) -> Any:
    module = AsksWhetherUpdated()
    trainer = make_trainer(layout)
    trainer.fit(module, loader(), loader(seed=2))
    return module.notes, plain(dict(trainer.callback_metrics))


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "layout", [Layout("1f1b", 2, 1, 2), Layout("zb_v", 2, 1, 2), Layout("zb_h1", 3, 1, 4)], ids=str
)
def test_every_rank_knows_which_metrics_were_updated(pool: WorkerPool, layout: Layout) -> None:
    # MeanMetric rounds what it is given to float32
    notes, logged = check_on_every_rank(pool, asked, layout, tolerance=1e-7)
    assert notes[0] == [True, False, False] and notes[1] == [True, True, False]
    assert sorted(logged) == ["a", "b", "first", "second"]


def asked_of_replicas() -> list[Any]:
    module = AsksWhetherUpdated()
    trainer = make_trainer(Layout("1f1b", 2, 2, 2), use_distributed_sampler=True)
    trainer.fit(module, loader(), loader(seed=2))
    return [module.notes, plain(dict(trainer.callback_metrics))]


def test_replicas_know_as_well(pool: WorkerPool) -> None:
    first, *others = pool.run(asked_of_replicas, world_size=4)
    assert first[0][0] == [True, False, False] and sorted(first[1]) == ["a", "b", "first", "second"]
    assert all(other == first for other in others)
