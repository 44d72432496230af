"""What steps keep on the module is what one device would keep."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter, defaultdict
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from feature_parts import assert_equal_trees
from pipelined_fit import fit, loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import SplitError


class Keeps(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.by_name: dict[str, Any] = {}
        self.num_batches_seen = 0
        self.mean_loss = 0.0
        self.cache: Any = None
        self.epochs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_batches_seen += 1
        if self.cache is None:
            self.cache = torch.ones(1, 8, dtype=torch.float64)
        loss = super().training_step((batch[0] * self.cache, batch[1]), batch_idx)
        self.mean_loss = 0.5 * self.mean_loss + 0.5 * loss.detach()
        self.by_name[f"batch {batch_idx}"] = loss.item()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        prediction = self(batch[0])
        self.outputs.append({"prediction": prediction, "error": (prediction - batch[1]).abs().mean()})

    def on_validation_epoch_end(self) -> None:
        predictions = torch.cat([output["prediction"] for output in self.outputs])
        errors = torch.stack([output["error"] for output in self.outputs])
        self.epochs.append((predictions.tolist(), errors.tolist()))
        self.outputs.clear()


def kept(pipelined: bool) -> dict[str, Any]:
    module = Keeps()
    run = trainer(precision="64-true") if pipelined else trainer(1, "auto", precision="64-true")
    run.fit(module, loader(14, 5), loader(7, 4, seed=2))
    return {
        "num": module.num_batches_seen,
        "mean": float(module.mean_loss),
        "by_name": module.by_name,
        "cache": tuple(module.cache.shape),
        "epochs": module.epochs,
    }


def test_kept_values_are_those_of_one_device_on_every_rank(pool: WorkerPool) -> None:
    [expected] = pool.run(kept, False, world_size=1)
    for values in pool.run(kept, True, world_size=2):
        assert values["num"] == expected["num"] == 3
        assert values["cache"] == expected["cache"]
        assert values["mean"] == pytest.approx(expected["mean"], rel=1e-12)
        assert values["by_name"] == pytest.approx(expected["by_name"], rel=1e-12)
        for (predictions, errors), (its_predictions, its_errors) in zip(
            values["epochs"], expected["epochs"], strict=True
        ):
            assert predictions == pytest.approx(its_predictions, rel=1e-12)
            assert errors == pytest.approx(its_errors, rel=1e-12)


class Meter:
    """As many write one."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count


class Counts(Blocks):
    """Sums, means and counts in containers, in an object, and in tensors and arrays that are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Any] = {"loss": 0.0, "right": 0.0, "rows": 0, "inner": {"rows": 0}}
        self.named: defaultdict[str, float] = defaultdict(float)
        self.signs: Counter[int] = Counter()
        self.lists: defaultdict[str, list[Any]] = defaultdict(list)
        self.meter = Meter()
        self.total = torch.zeros(2, dtype=torch.float64)
        self.moving = torch.zeros((), dtype=torch.float64)
        self.num_steps = torch.zeros((), dtype=torch.long)
        self.histogram = np.zeros((2, 2), dtype=np.int64)
        self.mean = np.zeros(8)
        self.rows = np.zeros((0, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = super().training_step(batch, batch_idx)
        signs = (y > 0).long().tolist()
        self.sums["loss"] += loss.item()
        self.sums["right"] += float((y > 0).sum().item())
        self.sums["rows"] += len(y)
        self.sums["inner"]["rows"] += len(y)
        self.named["loss"] += loss.item()
        self.named["steps"] += 1
        self.signs.update(signs)
        self.lists["signs"].extend(signs)
        self.lists["x"].append(x)
        self.meter.update(loss.item(), len(y))
        self.total += torch.stack([y.sum(), x.sum()])
        self.moving.mul_(0.9).add_(loss.detach(), alpha=0.1)
        self.num_steps += 1
        np.add.at(self.histogram, (signs, signs), 1)
        self.mean *= 0.5
        self.mean += 0.5 * x.numpy().mean(0)
        self.rows = np.concatenate([self.rows, x.numpy()])
        return loss


COUNTED = (
    *("sums", "named", "signs", "lists", "total", "moving", "num_steps", "histogram", "mean", "rows"),
    *("meter.total", "meter.count"),
)


def counted(num_microbatches: int | None, check_first_batches: bool = True) -> dict[str, Any]:
    module = Counts()
    if num_microbatches is None:
        run = trainer(1, "auto", precision="64-true", max_epochs=2)
    else:
        strategy = PipelineParallelStrategy(2, 1, num_microbatches, check_first_batches=check_first_batches)
        run = trainer(2, strategy, precision="64-true", max_epochs=2)
    run.fit(module, loader(14, 4))
    return {name: attrgetter(name)(module) for name in COUNTED}


@pytest.mark.by_day(2)
@pytest.mark.parametrize(("num_microbatches", "check_first_batches"), [(4, True), (2, False), (2, True)])
def test_what_a_step_counts_is_that_of_one_device_on_every_rank(
    pool: WorkerPool, num_microbatches: int, check_first_batches: bool
) -> None:
    [expected] = pool.run(counted, None, world_size=1)
    assert expected["sums"]["rows"] == 28 and expected["histogram"].sum() == 28
    for values in pool.run(counted, num_microbatches, check_first_batches, world_size=2):
        for name, value in expected.items():
            found = values[name]
            if isinstance(value, np.ndarray):
                np.testing.assert_allclose(found, value, rtol=1e-9, err_msg=name)
            else:
                assert_equal_trees(found, value, path=name)


class WritesElsewhere(Blocks):
    """Adds in place to a tensor in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = {"loss": torch.zeros(())}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.sums["loss"] += loss.detach()  # the line
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.looks = True


def told(kind: type[Blocks]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(kind())
        except SplitError as error:
            return [str(error)]
    return [str(warning.message) for warning in caught if " writes " in str(warning.message)]


def test_adding_in_place_to_a_tensor_of_a_container_is_an_error_with_its_line(pool: WorkerPool) -> None:
    found = pool.run(told, WritesElsewhere, world_size=2)
    lines, start = inspect.getsourcelines(WritesElsewhere)
    line = start + next(index for index, text in enumerate(lines) if "# the line" in text)
    for (text,) in found:
        assert f"in place, at {__file__}:{line} in training_step, into a tensor" in text


class Appends(WritesElsewhere):
    """Leaves a tensor in a list, which writes into nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.left = [batch[0], super(WritesElsewhere, self).training_step(batch, batch_idx).detach()]
        return self.left[1] * 0 + self.loss(batch)


def test_a_step_that_leaves_its_batch_in_an_attribute_does_not_write_into_it(pool: WorkerPool) -> None:
    assert pool.run(told, Appends, world_size=2) == [[], []]


class CountsOnOneReplica(Blocks):
    """Counts samples where the first is positive: those of the first replica."""

    def __init__(self) -> None:
        super().__init__()
        self.num_positive = 0

    def train_dataloader(self) -> Any:
        x = torch.randn(16, 8, dtype=torch.float64)
        x[:, 0] = x[:, 0].abs() * (1 - 2 * self.trainer.strategy.data_parallel_rank)
        return DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0][0, 0] > 0:
            self.num_positive += len(batch[0])
        return super().training_step(batch, batch_idx)


def num_positive() -> int:
    strategy = PipelineParallelStrategy(2, 2, 2, schedule="1f1b", check_first_batches=False)
    module, run = CountsOnOneReplica(), trainer(4, strategy, precision="64-true", use_distributed_sampler=False)
    run.fit(module)
    return module.num_positive


def test_what_one_replica_counts_is_learned_on_all(pool: WorkerPool) -> None:
    assert sorted(pool.run(num_positive, world_size=4, timeout=60)) == [0, 0, 16, 16]


class CountsLate(Blocks):
    """Counts samples above a limit, of which the first batches have none, and batches, from the third on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_high = self.num_late = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_high += int((batch[0][:, 0] > 2).sum())
        self.num_late += int(self.global_step > 1)
        return super().training_step(batch, batch_idx)


def counted_late(rows_with_high: list[list[int]], checks: bool) -> tuple[int, int, list[str]]:
    """In a worker: both counts, and the warnings of ``num_high``; four samples a batch, these of them high."""
    x = torch.linspace(0, 1, 32 * len(rows_with_high), dtype=torch.float64).reshape(-1, 8)
    for index, rows in enumerate(rows_with_high):
        x[[4 * index + row for row in rows], 0] = 3.0
    data, module = DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=4), CountsLate()
    strategy = PipelineParallelStrategy(2, num_microbatches=2, schedule="1f1b", check_first_batches=checks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(2, strategy, precision="64-true").fit(module, data)
    return module.num_high, module.num_late, [str(it.message) for it in caught if "'num_high'" in str(it.message)]


def test_a_count_that_begins_late_is_that_of_one_device(pool: WorkerPool) -> None:
    for rows in ([[], [], [0, 1, 2]], [[], [], [0, 3], [0, 3]]):
        expected = sum(map(len, rows)), len(rows) - 2, []
        assert pool.run(counted_late, rows, True, timeout=60) == [expected] * 2


def test_a_count_that_no_check_has_seen_is_told_where_it_may_be_wrong(pool: WorkerPool) -> None:
    (*first, none), (*last, [text]) = pool.run(counted_late, [[], [], [0, 3], [0, 3]], False, timeout=60)
    assert first == last == [2, 2] and not none
    assert text.startswith("Each microbatch took 'num_high' from 0 to 1; in the batches that were checked it did not")
