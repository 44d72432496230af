"""Metrics of torchmetrics whose value a step trains through, or whose state hooks ask for, on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from feature_parts import check_on_every_rank, make_trainer, make_unchecked_trainer, plain
from parity_run import Layout
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor, nn
from torchmetrics import (
    MaxMetric,
    MeanAbsoluteError,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
)
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, MulticlassAccuracy

LAYOUTS = [Layout("1f1b", 2, 1, 2), Layout("zb_h1", 3, 1, 4)]


class FullState(Metric):
    """As some metrics of libraries: differentiable, and updated twice for a value on a batch."""

    full_state_update = True
    is_differentiable = True
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, target: Tensor) -> None:
        self.total = self.total + (predictions - target).square().sum()
        self.count += target.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class TrainsThroughMetric(Blocks):
    def __init__(self, kind: str) -> None:
        super().__init__()
        kinds: dict[str, type[Metric]] = {"mse": MeanSquaredError, "mae": MeanAbsoluteError, "full_state": FullState}
        self.criterion = kinds[kind]().set_dtype(torch.float64)
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader())
    doubts = [str(each.message) for each in caught if "writes in place" in str(each.message)]
    return module.seen, plain(dict(trainer.callback_metrics)), doubts


@pytest.mark.by_day(2)
@pytest.mark.parametrize("kind", ["mse", "mae", "full_state"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_loss_is_what_a_metric_returns(pool: WorkerPool, layout: Layout, kind: str) -> None:
    losses, _, doubts = check_on_every_rank(pool, trained_through, layout, kind)
    assert losses[-1] < losses[0] and not doubts


class Distances(Metric):
    """Returns a dict, as those of detection and optical flow do."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "large", "number"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, target: Tensor) -> None:
        distances = (predicted - target).abs()
        self.total += distances.sum()
        self.large += (distances > 1).sum()
        self.number += distances.numel()

    def compute(self) -> dict[str, Tensor]:
        return {"mean": self.total / self.number, "large": self.large / self.number}


class LogsValues(Blocks):
    """Logs what metrics return, whose values on a batch are no means over its microbatches."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"rmse": MeanSquaredError(squared=False), "pearson": PearsonCorrCoef()}
        self.metrics = nn.ModuleDict({name: metric.set_dtype(torch.float64) for name, metric in kinds.items()})
        self.signs = MetricCollection({"f1": BinaryF1Score(), "auroc": BinaryAUROC()})
        self.mean, self.largest = (kind().set_dtype(torch.float64) for kind in (MeanMetric, MaxMetric))
        self.running = MeanSquaredError(squared=False).set_dtype(torch.float64)
        self.distances, self.per_class = Distances(), MulticlassAccuracy(2, average=None)
        self.nested = MetricCollection({"distances": Distances(), "f1": BinaryF1Score()}, prefix="nested_")
        self.seen: list[dict[str, float]] = []

    def log_all(self, batch: Any, stage: str) -> Tensor:
        x, y = batch
        predicted = self(x)
        loss = nn.functional.mse_loss(predicted, y)
        flat, target = predicted.detach().flatten(), y.flatten()
        for name, metric in self.metrics.items():
            self.log(f"{stage}_{name}", metric(flat, target))
        self.log_dict({f"{stage}_{name}": v for name, v in self.signs(flat.sigmoid(), (target > 0).int()).items()})
        self.log_dict({f"{stage}_of_{name}": value for name, value in self.distances(predicted, y).items()})
        self.log(f"{stage}_distance", self.nested(flat, (target > 0).int())["nested_mean"])
        signs = (torch.stack([-flat, flat], -1), (target > 0).long())
        self.log(f"{stage}_positive", self.per_class(*signs)[1])
        self.log(f"{stage}_mean", self.mean(flat))
        self.log(f"{stage}_largest", self.largest(flat), on_step=True, on_epoch=False)
        self.running.update(flat, target)
        self.log(f"{stage}_running", self.running.compute())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.log_all(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all(batch, "validated")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(plain(dict(self.trainer.callback_metrics)))


class OverridesLog(LogsValues):
    """Has a ``log`` of its own, and gets metrics anew when training starts, as those of some libraries do."""

    def on_train_start(self) -> None:
        self.running = MeanSquaredError(squared=False).set_dtype(torch.float64)
        self.metrics["rmse"] = MeanSquaredError(squared=False).set_dtype(torch.float64)

    def log(self, *args: Any, **kwargs: Any) -> None:
        if not self.trainer.predicting:
            super().log(*args, **kwargs)


def logged_values(layout: Layout | None, kind: type[LogsValues]) -> Any:
    module = kind()
    trainer = make_trainer(layout, check_first_batches=layout is None or layout.schedule == "1f1b")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(), loader(seed=2))
    doubts = [str(each.message) for each in caught if "depends on how the batch is cut" in str(each.message)]
    return module.seen, plain(dict(trainer.callback_metrics)), doubts


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("schedule", "kind"), [("zb_v", LogsValues), ("1f1b", LogsValues), ("1f1b", OverridesLog)])
def test_values_of_metrics_are_logged_as_on_one_device(pool: WorkerPool, schedule: str, kind: type[LogsValues]) -> None:
    # some metrics keep float32
    layout = Layout(schedule, 2, 1, 2)
    seen, logged, doubts = check_on_every_rank(pool, logged_values, layout, kind, tolerance=1e-6)
    assert len(seen) > 1 and len(logged) == 21 and not doubts


class LogsPercentages(LogsValues):
    def log_all(self, batch: Any, stage: str) -> Tensor:
        x, y = batch
        predicted = self(x)
        self.log(f"{stage}_percent", 100 * self.metrics["rmse"](predicted.detach().flatten(), y.flatten()))
        return nn.functional.mse_loss(predicted, y)


def doubts_about_percentages(layout: Layout) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout).fit(LogsPercentages(), loader())
    return [str(each.message) for each in caught if "train_percent" in str(each.message)]


def test_what_is_computed_from_a_value_is_told(pool: WorkerPool) -> None:
    doubts = pool.run(doubts_about_percentages, LAYOUTS[0], world_size=2)[0]
    assert doubts[0].startswith("The value that training_step logs as 'train_percent'")


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
    trainer = make_unchecked_trainer(Layout("1f1b", 2, 2, 2), use_distributed_sampler=True)
    trainer.fit(module, loader(), loader(seed=2))
    return [module.notes, plain(dict(trainer.callback_metrics))]


def test_replicas_know_as_well(pool: WorkerPool) -> None:
    first, *others = pool.run(asked_of_replicas, world_size=4)
    assert first[0][0] == [True, False, False] and sorted(first[1]) == ["a", "b", "first", "second"]
    assert all(other == first for other in others)


class KeepsMeans(Blocks):
    """Means of losses: each batch alike, by its samples, by what a mask keeps of it, and of single samples."""

    def __init__(self) -> None:
        super().__init__()
        names = ("alike", "sized", "masked", "rows", "number", "twice")
        self.means = nn.ModuleDict({name: MeanMetric().set_dtype(torch.float64) for name in names})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        rows = (self(x).flatten() - y.flatten()).square()
        loss, kept, found = rows.mean(), x[:, 0] > -0.5, rows.detach()
        self.means["alike"].update(loss.detach())
        self.means["sized"](found.mean(), weight=len(x))
        self.means["masked"].update((found * kept).sum() / kept.sum().clamp(min=1), kept.sum())
        self.means["rows"].update(found)
        self.means["number"].update(loss.item())
        self.means["twice"].update(found.mean(), torch.tensor(2.0))
        for name in ("sized", "masked"):
            self.log(name, self.means[name], on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        for name in ("alike", "rows", "number", "twice"):
            self.log(name, self.means[name].compute())
            self.means[name].reset()


def means_of(layout: Layout | None) -> Any:
    trainer = make_trainer(layout)
    trainer.fit(KeepsMeans(), loader(num_samples=10))
    return plain(dict(trainer.callback_metrics))


@pytest.mark.parametrize("layout", [Layout("1f1b", 2, 1, 3), Layout("1f1b", 2, 1, 1)], ids=str)
def test_means_are_those_of_one_device_where_batches_are_cut_unevenly(pool: WorkerPool, layout: Layout) -> None:
    # batches of 4, 4 and 2 samples; MeanMetric rounds what it is given to float32
    found = check_on_every_rank(pool, means_of, layout, tolerance=1e-6)
    assert len(found) == 6 and abs(found["alike"] - found["rows"]) > 1e-3


class InADict(Blocks):
    """Keeps its metrics in a dict, which is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"mae": MeanAbsoluteError(), "mse": MeanSquaredError().set_dtype(torch.float64)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        predicted = self(x)
        for name, metric in self.metrics.items():
            self.log(name, metric(predicted, y))
        return nn.functional.mse_loss(predicted, y)

    def on_train_epoch_end(self) -> None:
        self.log("of_epoch", self.metrics["mse"].compute())


def logged_from_a_dict(layout: Layout | None) -> Any:
    run = make_trainer(layout)
    run.fit(InADict(), loader())
    return plain(dict(run.callback_metrics))


@pytest.mark.parametrize("layout", [Layout("1f1b", 2, 1, 2), Layout("1f1b", 2, 2, 2)], ids=str)
def test_metrics_in_a_dict(pool: WorkerPool, layout: Layout) -> None:
    check_on_every_rank(pool, logged_from_a_dict, layout)
