"""torchmetrics in pipelined steps against the same module in a plain one-device Trainer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from one_pipeline import OnePipelineStrategy, Regression, assert_same, grid, loader, trainer
from pool import WorkerPool
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MeanSquaredError, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.strategy.results.metrics import PipelineMetrics, metrics_suspended


class Measured(Regression):
    """Uses metrics of every kind, and computes them in hooks, on every rank."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__(lr)
        self.error = MeanSquaredError()
        self.largest = MaxMetric()
        self.all_values = CatMetric()
        self.correlation = PearsonCorrCoef()
        self.total = SumMetric()
        self.weighted = MeanMetric()
        self.ratio = self.total / self.weighted
        self.collection = MetricCollection(
            [MulticlassPrecision(num_classes=3, average="macro"), MulticlassRecall(num_classes=3, average="macro")],
            prefix="val/",
        )
        self.extremes = MinMaxMetric(MeanSquaredError())
        self.by_class = ClasswiseWrapper(MulticlassAccuracy(num_classes=3, average=None))
        self.tracker = MetricTracker(MeanSquaredError(), maximize=False)
        self.found: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self(x)
        self.largest(x)
        self.all_values.update(x[:, 0])
        self.tracker.update(prediction, y)
        return {"loss": F.mse_loss(prediction, y)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        prediction = self(x)
        self.error.update(prediction, y)
        self.correlation.update(prediction.squeeze(1), y.squeeze(1))
        self.total.update(x)
        self.weighted.update(x, weight=x.abs())
        labels, classes = x[:, :3].argmax(1), y.squeeze(1).clamp(0, 2.9).long()
        self.collection.update(labels, classes)
        self.by_class.update(labels, classes)
        self.extremes.update(prediction, y)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def on_train_epoch_end(self) -> None:
        found = {"largest": self.largest.compute(), "all": self.all_values.compute().sort().values}
        self.found.append({**found, "tracked": self.tracker.compute()})
        self.largest.reset()
        self.all_values.reset()

    def on_validation_epoch_end(self) -> None:
        names = ("error", "correlation", "total", "weighted", "ratio", "collection", "extremes", "by_class")
        metrics: dict[str, Any] = {name: getattr(self, name) for name in names}
        first = {name: metric.compute() for name, metric in metrics.items()}
        # a second time, from the cache or not, and of a composition made on the fly
        self.found.append({**first, "again": self.error.compute(), "sum": (self.error + self.total).compute()})
        for name in ("error", "correlation", "total", "weighted", "collection", "by_class"):
            metrics[name].reset()


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def measure(strategy: Any = "auto", replica: int = 0, num_replicas: int = 1) -> Any:
    torch.manual_seed(3)
    module = Measured()
    share = {"replica": replica, "num_replicas": num_replicas}
    trainer(strategy).fit(module, loader(5, **share), loader(7, seed=1, **share))
    return plain(module.found)


def measure_in_a_grid(num_replicas: int, last_stage_rank: int) -> tuple[Any, list[str]]:
    groups = grid(num_replicas, last_stage_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure(OnePipelineStrategy(2, groups), groups.replica, num_replicas)
    return found, [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("world_size", "num_replicas", "last_stage_rank"), [(2, 1, 1), (2, 1, 0), (2, 2, 0), (4, 2, 1)]
)
def test_computed_in_a_hook_every_rank_has_the_value_over_all_data(
    pool: WorkerPool, world_size: int, num_replicas: int, last_stage_rank: int
) -> None:
    expected = measure()
    assert len(expected) == 5  # a sanity check, and two epochs of training and validation
    ranks = pool.run(measure_in_a_grid, num_replicas, last_stage_rank, world_size=world_size, process_group=True)
    for found, complaints in ranks:
        assert_same(found, expected, 1e-5)
        assert found == ranks[0][0]
        assert not [w for w in complaints if "``compute`` method" in w]


def test_microbatches_accumulate_as_one_batch() -> None:
    assert_same(measure(OnePipelineStrategy(3)), measure(), 1e-5)


class Computes(Regression):
    """Asks for values in the step, where they are of this rank's data, and in a hook that sees every rank's data."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric(dist_sync_on_step=True)
        self.wrapped = MinMaxMetric(SumMetric())
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self(batch[0])
        self.seen.append(float(self.total(torch.ones(len(batch[0])))))
        self.seen.append(float(self.wrapped(torch.ones(len(batch[0])))["raw"]))
        self.seen.append(float(self.total.compute()))
        return {"loss": prediction.mean()}

    def on_train_batch_end(self, *args: Any) -> None:
        # on every rank of a pipeline alike: local, and no collective
        self.seen.append(float(self.total(torch.tensor(100.0))))

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.total.compute()))


def compute_everywhere() -> list[float]:
    groups = grid(2, 1)
    module = Computes()
    share = {"replica": groups.replica, "num_replicas": 2}
    trainer(OnePipelineStrategy(2, groups), max_epochs=1).fit(module, loader(8, 8, **share))
    return module.seen


def test_values_in_a_step_and_of_forward_are_local(pool: WorkerPool) -> None:
    # 2 replicas of 4 samples in 2 microbatches; the hook adds 100 on each
    first, last = pool.run(compute_everywhere, world_size=4, process_group=True)[:2]
    assert last == [2.0, 2.0, 2.0, 2.0, 2.0, 4.0, 100.0, 208.0]
    assert first == [100.0, 208.0]


class Fails(Metric):
    def update(self) -> None: ...

    def compute(self) -> Tensor:
        raise ZeroDivisionError("no data")


def compute_a_failing_metric() -> None:
    groups = grid(1, 1)
    module = nn.ModuleDict({"fails": Fails()})
    PipelineMetrics(module, groups).attach()
    module["fails"].compute()


def test_a_failing_compute_raises_on_every_rank(pool: WorkerPool) -> None:
    report = pool.run(compute_a_failing_metric, world_size=2, process_group=True, expect_failure=True)
    assert [failure and failure.type for failure in report.failures] == ["ZeroDivisionError", "ZeroDivisionError"]


def states(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        if isinstance(part, Metric):
            found[name] = (copy.deepcopy(part.metric_state), part.update_count, sorted(vars(part)))
        if isinstance(part, MetricCollection):
            found[name] = (copy.deepcopy(part.compute_groups), part._groups_checked, sorted(vars(part)))
    return found


def test_suspended_metrics_see_nothing() -> None:
    module = Measured()
    module.error.update(torch.ones(2), torch.zeros(2))
    before = states(module)
    with FakeTensorMode():
        prediction, target = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    calls: list[int] = []
    with metrics_suspended(module, lambda args: calls.append(len(args))):
        assert module.error(prediction, target=target) == 0.0
        assert module.error.compute() == 0.0
        assert module.error.update(prediction, target) is None
        module.error.reset()
        value = module.collection(prediction, target=target)
        assert value == {"val/MulticlassPrecision": 0.0, "val/MulticlassRecall": 0.0}
        assert module.collection.compute().keys() == value.keys()
        module.collection.update(prediction, target)
        module.collection.reset()
        module.extremes.update(prediction, target)
        module.tracker.increment()
    assert calls == [2, 2, 2, 2, 0, 0, 2, 2, 2]
    after = states(module)
    assert {name: str(state) for name, state in after.items() if name in before} == {
        name: str(state) for name, state in before.items()
    }
    assert module.error.compute() == 1.0


def fail_in_a_step(module: Measured) -> None:
    with metrics_suspended(module):
        assert module.error(torch.ones(1), torch.ones(1)) == 0.0
        raise KeyError


def test_suspension_ends_with_an_exception_and_answers_zero_by_default() -> None:
    module = Measured()
    with pytest.raises(KeyError):
        fail_in_a_step(module)
    assert module.error(torch.ones(1), torch.zeros(1)) == 1.0


def test_attach_covers_copies_and_detach_restores() -> None:
    module = nn.ModuleDict({"a": SumMetric()})
    original = module["a"].compute
    metrics = PipelineMetrics(module, ControlGroups())
    metrics.attach()
    attached = module["a"].compute
    metrics.attach()
    assert module["a"].compute is attached is not original
    module["copy"] = copy.deepcopy(module["a"])
    metrics.attach()
    module["copy"].update(3)
    module["a"].update(1)
    assert (module["a"].compute(), module["copy"].compute()) == (1, 3)
    metrics.detach()
    assert module["a"].compute is original
    assert module["copy"].compute() == 3
