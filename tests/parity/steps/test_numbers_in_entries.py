"""Numbers in what a step appends or returns: counts add up, means stay means, and what is neither is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from feature_parts import Data, check_on_every_rank, make, make_trainer
from parity_run import Layout
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor
from torch.nn.functional import cross_entropy

TWO_STAGES = Layout("1f1b", 2, 1, 2)
BY_NIGHT = [pytest.param(layout, marks=pytest.mark.nightly) for layout in (TWO_STAGES, Layout("zb_h1", 3, 1, 4))]
LAYOUTS = [Layout("zb_h1", 2, 1, 4), *BY_NIGHT]


class Appends(Classifier):
    """A dict for each batch, as libraries of time series append it, weighed by its count at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []
        self.counts = [0, 0, 0]
        self.num_seen: Any = 0
        self.was_seen = np.zeros(3, dtype=bool)
        self.last = torch.zeros((), dtype=torch.float64)
        self.best = float("inf")
        self.by_batch: dict[int, int] = {}
        self.num_right: dict[str, Any] = {"train": {"right": 0}, "all": 0}
        self.seen: list[Any] = []

    def of_batch(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        predictions = self(x)
        loss = cross_entropy(predictions, y)
        self.entries.append({"loss": loss.detach(), **self.numbers(x, predictions, y)})
        return {"loss": loss, "n_samples": len(y), "sizes": (len(y), x.shape[1])}

    def numbers(self, x: Any, predictions: Any, y: Any) -> dict[str, Any]:
        right = predictions.argmax(1) == y
        return {
            "n_samples": len(y),
            "width": x.shape[1],
            "of_numpy": np.int64(len(y)),
            "tensor": torch.tensor(len(y)),
            "num_right": int(right.sum()),
            "accuracy": right.double().mean().item(),
            "sum": [float(x.sum()), x.mean().item()],
        }

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = self.of_batch(batch)
        for label in batch[1].tolist():
            self.counts[label] += 1
        self.num_seen = self.num_seen + np.int64(len(batch[1]))
        self.was_seen[batch[1].numpy()] = True
        self.last = 0.5 * self.last + result["loss"].detach()
        self.best = min(self.best, result["loss"].item() if self.best == float("inf") else self.best)
        right = self.entries[-1]["num_right"]
        self.num_right["all"] += right
        self.num_right["train"]["right"] += right
        self.by_batch[self.global_step] = 1
        self.by_batch.pop(self.global_step - 2, None)
        return result

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.of_batch(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([{**outputs, "loss": float(outputs["loss"])}, self.last])

    def on_validation_epoch_end(self) -> None:
        weighed = sum(float(each["loss"]) * each["n_samples"] for each in self.entries)
        self.seen.append([weighed, *({**each, "loss": float(each["loss"])} for each in self.entries)])
        self.entries.clear()


def appended(layout: Layout | None) -> Any:
    module = make(Appends)
    make_trainer(layout).fit(module, Data(num_train=14, num_val=6))
    return plainly(
        [module.seen, module.counts, module.num_seen, module.was_seen, module.best, module.by_batch, module.num_right]
    )


def plainly(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plainly(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plainly, value))
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray, np.number)) else value


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_as_on_one_device(pool: WorkerPool, layout: Layout) -> None:
    seen, counts, num_seen, *_ = check_on_every_rank(pool, appended, layout)
    assert sum(counts) == num_seen == 28 and len(seen) > 4


class Buffers(Classifier):
    """Buffers outside of units that a step writes in place: a confusion matrix, counts, an average, and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.zeros(9, dtype=torch.int64))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("num_right", torch.zeros(()))
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        self.labels = torch.zeros(3, dtype=torch.int32)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        predictions = self(x)
        loss = cross_entropy(predictions, y)
        found = predictions.argmax(1)
        self.matrix += torch.bincount(3 * y + found, minlength=9)
        self.matrix.scatter_add_(0, y, torch.ones_like(y))
        self.num_seen += (y >= 0).sum()
        self.num_seen += len(y)
        self.num_right += (found == y).sum()
        self.average.mul_(0.9).add_(0.1 * loss.detach())
        self.num_steps += 1
        self.labels += torch.bincount(y, minlength=3).int()
        return loss + predictions.square().mean() * torch.clamp(self.num_steps / 10, max=1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([each.tolist() for _, each in self.named_buffers(recurse=False)] + self.labels.tolist())


def seen_by(layout: Layout | None, kind: type[Any]) -> Any:
    module = make(kind)
    make_trainer(layout).fit(module, Data(num_train=14, num_val=6))
    return module.seen


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_buffers_hold_what_they_would_on_one_device(pool: WorkerPool, layout: Layout) -> None:
    seen = check_on_every_rank(pool, seen_by, layout, Buffers)
    matrix, num_seen, _, _, num_steps, *labels = seen[-1]
    assert sum(matrix) == num_seen == 56 and sum(labels) == 28 and len(seen) == num_steps


class CountsInALoop(Classifier):
    """Counts sample by sample, in single elements of tensors: a confusion matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.zeros(3, 3))
        self.register_buffer("whole", torch.zeros(3, 3, dtype=torch.int64))
        self.right, self.total = torch.zeros(3).double(), torch.zeros(()).double()
        self.seen: list[Any] = []

    def count(self, found: Tensor, y: Tensor) -> None:
        for mine, its in zip(found, y, strict=True):
            self.matrix[its, mine] += 1
            self.whole[int(its)][int(mine)] += 1
            self.right[its] += (mine == its).double()
            self.total += mine

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predictions = self(batch[0])
        self.count(predictions.argmax(1), batch[1])
        return cross_entropy(predictions, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([each.tolist() for each in (self.matrix, self.whole, self.right, self.total)])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_elements_that_are_counted_in_a_loop_are_those_of_one_device(pool: WorkerPool, layout: Layout) -> None:
    matrix, whole, *_ = check_on_every_rank(pool, seen_by, layout, CountsInALoop)[-1]
    assert matrix == whole and sum(map(sum, whole)) == 28


class AddsToAnEntry(CountsInALoop):
    """Adds in place to a tensor in a dict, which no run of a step puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = {"matrix": torch.zeros(3, 3)}

    def count(self, found: Tensor, y: Tensor) -> None:
        self.sums["matrix"] += torch.bincount(3 * y + found, minlength=9).view(3, 3)


class CountsByIndex(AddsToAnEntry):
    def count(self, found: Tensor, y: Tensor) -> None:
        self.sums["matrix"][y, found] += 1


@pytest.mark.parametrize("kind", [AddsToAnEntry, CountsByIndex])
def test_adding_in_place_to_a_tensor_in_a_dict_is_refused(pool: WorkerPool, kind: type[AddsToAnEntry]) -> None:
    told = pool.refusals("SplitError", seen_by, TWO_STAGES, kind, world_size=TWO_STAGES.world_size, timeout=60)
    for message in told:
        assert "test_numbers_in_entries.py" in message and "Make it a buffer or an attribute of the module" in message


class Cached(Classifier):
    """Keeps what depends on the batch's size alone in a buffer that is nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_even", None, persistent=False)
        self.length, self.seen = -1, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if len(x) != self.length:
            self.is_even = torch.arange(len(x)) % 2 == 0
            self.length = len(x)
        return cross_entropy(self(x).masked_fill(self.is_even[:, None] & False, 0.0), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_cache_in_a_buffer_trains(pool: WorkerPool, layout: Layout) -> None:
    assert len(check_on_every_rank(pool, seen_by, layout, Cached)) == 4


class NeitherSumNorMean(Appends):
    """Different values: fewer than in the microbatches together, and more than in one of them."""

    def numbers(self, x: Any, predictions: Any, y: Any) -> dict[str, Any]:
        return {"n_samples": len(y), "num_values": len({1, 2, 3, *x[:, 0].tolist()})}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = self.of_batch(batch)
        return {"loss": result["loss"], "num_values": self.entries[-1]["num_values"]}


def refused(layout: Layout) -> None:
    make_trainer(layout).fit(make(NeitherSumNorMean), Data(num_train=14, num_val=6))


def test_a_number_that_is_neither_is_refused(pool: WorkerPool) -> None:
    for message in pool.refusals(None, refused, TWO_STAGES, world_size=2, timeout=60):
        assert "attribute 'entries' that training_step changes" in message, message
        assert "depends on how the batch is cut: it is 7 for 4 samples in one piece and 5 " in message, message
