"""``self.log`` in microbatched steps against the same module in a plain one-device Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.connectors.logger_connector import result
from one_pipeline import (
    MemoryLogger,
    OnePipelineStrategy,
    Regression,
    Snapshots,
    assert_same,
    grid,
    in_step,
    loader,
    report_of,
    trainer,
)
from pipelined_fit import fit as fit_in_a_pipeline
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, SumMetric

from lightning_pp.distributed.messages import MessageLine
from lightning_pp.errors import SplitError
from lightning_pp.strategy.results.log_calls import LogCall, merge_calls
from lightning_pp.strategy.results.logs import StepLogs


@contextmanager
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class LogsEverything(Regression):
    """Logs in every form that Lightning knows."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.train_error = MeanSquaredError()
        self.val_error = MeanSquaredError()
        self.running = MeanMetric()
        self.collection = MetricCollection({"mse": MeanSquaredError(), "sum": SumMetric()}, prefix="c/")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self(x)
        loss = F.mse_loss(prediction, y)
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        self.log("loss", loss, prog_bar=True, **both)
        self.log("plain", loss)
        self.log("positional", loss, True, False)
        self.log("train/float", 0.1 * batch_idx, **both)
        self.log("train/int", batch_idx)
        self.log("one_element", x.mean().reshape(1, 1), on_epoch=True, sync_dist=True)
        self.log_dict({"a/mean": x.mean(), "a/mean2": (x**2).mean()}, **both)
        self.log("peak", x.max(), reduce_fx="max", sync_dist=True, **both)
        self.log("low", x.min(), reduce_fx=torch.min, **both)
        self.log("integer_max", x.max().long(), reduce_fx=max, **both)
        self.log("given", x.mean(), batch_size=len(x), **both)
        self.log("elements", x.mean(), batch_size=torch.tensor(x.numel()), **both)
        self.log("constant_size", x.mean(), batch_size=3, on_step=True)
        self.log("graph", loss, enable_graph=True, **both)
        self.log("rank_zero", x.mean(), rank_zero_only=True, on_epoch=True)
        self.log("twice", x.mean(), **both)
        self.log("twice", (x**2).mean(), **both)
        if batch_idx == 0:
            self.log("first_batch_only", x.mean(), **both)
        self.train_error(prediction, y)
        self.log("error", self.train_error, prog_bar=True, **both)
        self.running.update(x.mean(), weight=len(x))
        self.log("running", self.running, metric_attribute="running", on_step=False, on_epoch=True)
        return {"loss": loss, "prediction": prediction}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        prediction = self(x)
        self.log("val_loss", F.mse_loss(prediction, y), prog_bar=True)
        self.log(f"val/unique_{dataloader_idx}", x.mean(), add_dataloader_idx=False, on_step=True, on_epoch=True)
        self.val_error(prediction, y)
        self.log("val_error", self.val_error)
        if dataloader_idx == 0:
            self.collection["mse"].update(prediction, y)
            self.collection["sum"].update(prediction)
            self.log_dict(self.collection, on_step=False, on_epoch=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("hook", 2.5)

    def on_validation_epoch_end(self) -> None:
        self.log("val_epoch", 1.25)


def fit(module: pl.LightningModule, strategy: Any = "auto", replica: int = 0, num_replicas: int = 1) -> dict[str, Any]:
    """Trains two epochs of uneven batches (5, 5, 2) and returns everything that Lightning saw logged."""
    logger, snapshots = MemoryLogger(), Snapshots()
    run = trainer(strategy, logger=logger, callbacks=[snapshots])
    share = {"replica": replica, "num_replicas": num_replicas}
    run.fit(module, loader(5, **share), [loader(7, seed=1, **share), loader(4, 8, seed=2, **share)])
    return {
        "rows": logger.rows,
        "views": snapshots.views,
        "weights": [p.detach().tolist() for p in module.parameters()],
    }


def fitted(make: Any, **options: Any) -> dict[str, Any]:
    with double():
        torch.manual_seed(7)
        return fit(make(lr=options.pop("lr", 0.05)), **options)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
def test_every_form_of_log_equals_one_device(num_microbatches: int) -> None:
    expected = fitted(LogsEverything)
    found = fitted(LogsEverything, strategy=OnePipelineStrategy(num_microbatches))
    assert len(expected["rows"]) > 6
    assert {"loss_step", "a/mean_epoch", "c/mse/dataloader_idx_0"} <= {
        key for _, row in expected["rows"] for key in row
    }
    assert_same(found, expected)


def fit_in_a_grid(num_replicas: int, last_stage_rank: int) -> dict[str, Any]:
    groups = grid(num_replicas, last_stage_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result.warning_cache.clear()
        found = fitted(
            LogsEverything,
            lr=0.0,
            strategy=OnePipelineStrategy(2, groups),
            replica=groups.replica,
            num_replicas=num_replicas,
        )
    found["warnings"] = [str(w.message) for w in caught]
    return found


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("world_size", "num_replicas", "last_stage_rank"), [(2, 1, 1), (2, 1, 0), (2, 2, 0), (4, 2, 1)]
)
def test_every_rank_of_every_replica_logs_what_one_device_logs(
    pool: WorkerPool, world_size: int, num_replicas: int, last_stage_rank: int
) -> None:
    expected = fitted(LogsEverything, lr=0.0)
    found = pool.run(fit_in_a_grid, num_replicas, last_stage_rank, world_size=world_size, process_group=True)
    for rank in found:
        complaints = rank.pop("warnings")
        # Lightning asks for sync_dist in the user's own hook, as in every distributed run, but not for what steps log
        assert not [w for w in complaints if "sync_dist" in w and "val_epoch" not in w], complaints
        assert not [w for w in complaints if "``compute`` method" in w], complaints
        assert_same(rank, expected)
    # not to a tolerance: all ranks have to decide alike
    assert all(rank == found[0] for rank in found)


class LogsValidationLoss(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # grows with the epoch, so that early stopping stops
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]) + self.current_epoch)


def stop_early(last_stage_rank: int, folder: str) -> tuple[int, str, float]:
    groups = grid(1, last_stage_rank)
    stopping = EarlyStopping("val_loss", patience=2)
    # a folder for each rank: these are processes with a checkpoint each, and would make way for each other's files
    own_folder = f"{folder}/{dist.get_rank()}"
    checkpoint = ModelCheckpoint(own_folder, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2)
    run = trainer(
        OnePipelineStrategy(3, groups), callbacks=[stopping, checkpoint], enable_checkpointing=True, max_epochs=9
    )
    torch.manual_seed(1)
    run.fit(LogsValidationLoss(lr=0.0), loader(5), loader(7))
    return run.current_epoch, Path(checkpoint.best_model_path).name, float(stopping.best_score)


def test_early_stopping_and_checkpoints_agree_on_every_rank(pool: WorkerPool, tmp_path: Any) -> None:
    first, second = pool.run(stop_early, 1, str(tmp_path), world_size=2, process_group=True)
    assert first == second
    assert first[0] == 3
    assert "epoch=0-val_loss=" in first[1]


class Overridden(Regression):
    """Has a ``log`` of its own, which must run once per call, not again when the call is replayed."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().log(f"mine/{name}", value * 2, *args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        self.log_dict({"x": batch[0].mean()})
        return {"loss": loss}


def test_an_overridden_log_runs_once_a_call() -> None:
    expected = fitted(Overridden)
    assert_same(fitted(Overridden, strategy=OnePipelineStrategy(3)), expected)
    assert "mine/loss_step" in expected["rows"][0][1]


class LogsTheSame(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("number", 2.5)
        return {"loss": loss}


def test_lightning_looks_at_equal_calls_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fitted(LogsTheSame)
    seen: list[str] = []
    log = pl.LightningModule.log

    def counted(module: pl.LightningModule, name: str, *args: Any, **options: Any) -> None:
        seen.append(name)
        log(module, name, *args, **options)

    monkeypatch.setattr(pl.LightningModule, "log", counted)
    assert_same(fitted(LogsTheSame, strategy=OnePipelineStrategy(2)), expected)
    num_batches = 6  # two epochs of 5, 5 and 2 samples
    assert seen.count("loss") == num_batches
    assert seen.count("number") == 2 * num_batches  # not a tensor: Lightning sees it in each microbatch


class LogsOtherwise(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=batch_idx == 0)
        return {"loss": loss}


def test_a_key_that_is_logged_with_other_options_in_a_later_batch_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="twice in `training_step` with different arguments"):
        fitted(LogsOtherwise, strategy=OnePipelineStrategy(2))


class LogsInSomeMicrobatches(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        if x[0, 0] == 0:
            self.log("sometimes", x[:, 1].mean(), on_step=True, on_epoch=True)
        return {"loss": loss}


def test_a_key_is_averaged_over_the_microbatches_that_logged_it() -> None:
    x = torch.tensor([[0.0, 1, 0, 0], [9, 3, 0, 0], [1, 100, 0, 0], [1, 100, 0, 0], [0, 8, 0, 0]])
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=5)
    run = trainer(OnePipelineStrategy(3), max_epochs=1)
    run.fit(LogsInSomeMicrobatches(), batches)
    # samples 0, 1 and 4, in microbatches of 2 and 1
    assert run.callback_metrics["sometimes_step"] == pytest.approx((2 * 2 + 8) / 3)
    assert run.callback_metrics["sometimes_epoch"] == pytest.approx((2 * 2 + 8) / 3)


class LogsMaskedMean(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        mask = x > 1.3  # nothing, in one replica: a mean of 0 / 0 over 0 things
        self.log("masked", (x * mask).sum() / mask.sum(), batch_size=int(mask.sum()), on_step=True, on_epoch=True)
        return {"loss": F.mse_loss(self(x), y)}


def fit_masked_in_a_grid() -> dict[str, Any]:
    groups = grid(2, 0)
    strategy = OnePipelineStrategy(1, groups)
    return fitted(LogsMaskedMean, lr=0.0, strategy=strategy, replica=groups.replica, num_replicas=2)


def test_replicas_weigh_by_the_batch_sizes_that_the_user_gave(pool: WorkerPool) -> None:
    expected = fitted(LogsMaskedMean, lr=0.0)
    for rank in pool.run(fit_masked_in_a_grid, world_size=2, process_group=True):
        assert_same(rank, expected)


class LogsWrongly(Regression):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        if self.what == "vector":
            self.log("x", x)
        elif self.what == "nested":
            self.log("x", {"a": {"b": x.mean()}})
        elif self.what == "string":
            self.log("x", "text")
        elif self.what == "reduction":
            self.log("x", x.mean(), reduce_fx=torch.median)
        elif self.what == "never":
            self.log("x", x.mean(), on_step=False, on_epoch=False)
        elif self.what == "dataloader":
            self.log("x/dataloader_idx_0", x.mean())
        elif self.what == "twice":
            self.log("x", x.mean(), on_epoch=True)
            self.log("x", x.mean(), on_epoch=False)
        elif self.what == "unregistered":
            self.log("x", SumMetric())
        return {"loss": self(x).mean()}


@pytest.mark.parametrize(
    "what", ["vector", "nested", "string", "reduction", "never", "dataloader", "twice", "unregistered"]
)
def test_wrong_arguments_raise_as_on_one_device(what: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException)) as expected:
        trainer().fit(LogsWrongly(what), loader(5))
    with pytest.raises((ValueError, MisconfigurationException)) as found:
        trainer(OnePipelineStrategy(2)).fit(LogsWrongly(what), loader(5))
    assert type(found.value) is type(expected.value)
    assert str(found.value)[:30] == str(expected.value)[:30]


class MetricElsewhere(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        metric = SumMetric()
        self.log("x", metric, metric_attribute="nowhere")
        return {"loss": self(batch[0]).mean()}


def test_a_metric_that_other_ranks_cannot_find_is_refused() -> None:
    with pytest.raises(ValueError, match="not an attribute of the MetricElsewhere"):
        trainer(OnePipelineStrategy(2)).fit(MetricElsewhere(), loader(5))


class LogsFake(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with FakeTensorMode():
            hidden = torch.zeros(3)
        self.log("hidden_norm", hidden.norm())
        return {"loss": self(batch[0]).mean()}


def test_a_value_of_another_stage_is_refused_where_it_is_logged() -> None:
    with pytest.raises(SplitError, match="'hidden_norm'.*another stage"):
        trainer(OnePipelineStrategy(2)).fit(LogsFake(), loader(5))


def fail_to_merge() -> None:
    groups = grid(1, 1)
    logs = StepLogs()
    report = report_of(MessageLine(groups, torch.device("cpu")), logs, [2, 2])
    if groups.is_last_stage:
        logs._microbatches[4] = []
        report.send([1.0, 1.0])
    report.receive_and_apply(Regression(), 0)


def test_a_failed_merge_raises_on_every_rank(pool: WorkerPool) -> None:
    report = pool.run(fail_to_merge, world_size=2, process_group=True, expect_failure=True)
    assert [failure and failure.type for failure in report.failures] == ["IndexError", "IndexError"]
    assert all(failure and "index out of range" in failure.message for failure in report.failures)


class SwallowsLogs(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logs = StepLogs()
        with in_step(logs, self, None):
            self.log("x", batch[0].mean())
            self.log("error", self.error)
        assert logs.merge([1.0], 5) == []
        return self(batch[0]).mean()


def test_swallowed_values_leave_no_trace() -> None:
    run = trainer(max_epochs=1)
    run.fit(SwallowsLogs(), loader(12))
    assert "x" not in run.callback_metrics
    assert not {"log", "reset"} & vars(run.fit_loop.epoch_loop._results).keys()


class Predicts(Regression):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        with in_step(StepLogs(), self, 0):
            self.log("x", 1.0)


def test_logging_in_predict_is_refused_as_on_one_device() -> None:
    with pytest.raises(MisconfigurationException, match="result collection is not registered"):
        trainer().predict(Predicts(), torch.utils.data.DataLoader(torch.ones(4, 4)))


def call(value: float, weight: float = 1.0, batch_size: float | None = None, **changes: Any) -> LogCall:
    options = {"reduce_fx": changes.pop("reduce_fx", "mean")}
    fields: dict[str, Any] = {"name": "x", "occurrence": 0, "metric": None, "dtype": torch.float32, **changes}
    return LogCall(
        "training_step",
        dataloader_idx=None,
        options=options,
        value=value,
        weight=weight,
        batch_size=batch_size,
        **fields,
    )


def test_merge_arithmetic() -> None:
    nan = float("nan")

    def merged(*calls: LogCall, by_batch_size: bool = False) -> float | None:
        (only,) = merge_calls([[one] for one in calls], by_batch_size=by_batch_size)
        return only.value

    assert merged(call(1.0, 1), call(4.0, 2)) == 3.0
    assert merged(call(0.1, 0.3), call(0.1, 0.3), call(0.1, 0.1)) == 0.1  # bit for bit
    assert merged(call(1.0, 1, batch_size=1), call(4.0, 2, batch_size=5)) == 3.0
    assert merged(call(1.0, 1, batch_size=1), call(4.0, 2, batch_size=5), by_batch_size=True) == 3.5
    assert merged(call(1.0, 1, batch_size=7), call(4.0, 2, batch_size=7), by_batch_size=True) == 3.0  # says nothing
    assert merged(call(1.0, 1), call(4.0, 2, batch_size=5), by_batch_size=True) == 3.0
    assert merged(call(nan, 0), call(4.0, 2)) == 4.0
    assert merged(call(1.0, reduce_fx="min"), call(nan, reduce_fx="min")) != 0.0
    assert str(merged(call(1.0, reduce_fx="max"), call(nan, reduce_fx="max"))) == "nan"
    assert merged(call(float("inf")), call(float("inf"))) == float("inf")
    assert [
        c.value for c in merge_calls([[call(1.0), call(5.0, occurrence=1)], [call(3.0), call(7.0, occurrence=1)]])
    ] == [2.0, 6.0]
    with pytest.raises(MisconfigurationException, match="differs between the microbatches"):
        merged(call(1.0), call(1.0, reduce_fx="sum"))


@pytest.mark.parametrize(
    ("dtype", "reduce_fx", "expected"),
    [
        (torch.float32, "mean", torch.float32),
        (torch.float64, "mean", torch.float64),
        (torch.bfloat16, "mean", torch.float32),
        (torch.int64, "mean", torch.float32),
        (torch.int64, "sum", torch.int64),
        (torch.bool, "sum", torch.float32),
    ],
)
def test_dtype_of_the_merged_value(dtype: torch.dtype, reduce_fx: str, expected: torch.dtype) -> None:
    assert call(1.0, dtype=dtype, reduce_fx=reduce_fx).value_dtype() is expected


class LogsPastSelfLog(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        assert self.logger is not None
        self.logger.log_metrics({"loss": loss.item()}, step=self.global_step)
        return loss


class Notebook(Logger):
    """Notes what it is given, on every rank."""

    name, version = "notebook", 0

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.values += [metrics["loss"]] if "loss" in metrics else []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def values_of_a_logger() -> list[float]:
    notebook = Notebook()
    fit_in_a_pipeline(LogsPastSelfLog(), logger=notebook)
    return notebook.values


def test_a_logger_that_a_step_calls_itself_gets_nothing_made_up(pool: WorkerPool) -> None:
    first, last = pool.run(values_of_a_logger, world_size=2)
    assert first == []
    assert len(last) == 3 * 2  # batches, microbatches
    assert min(last) > 0.0
