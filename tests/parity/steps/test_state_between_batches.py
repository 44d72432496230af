"""State that a step leaves for the next one: as on one device, or refused in the first batch with its name and line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from feature_parts import Data, check_with_weights, make, make_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor, nn

ONE = Layout("1f1b", 2, 1, 1)
FOUR = Layout("1f1b", 2, 1, 4)


class Sequences(Data):
    """Batches of eight only, of vectors."""

    def __init__(self) -> None:
        super().__init__(num_train=32, num_val=16, train_batch=8, val_batch=8)


class Stateful(Classifier):
    """The vector is read as six steps of one number."""

    hidden: Any = None

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 5))
        self.rnn = nn.LSTM(5, 4, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.hidden = None

    def on_validation_epoch_start(self) -> None:
        self.hidden = None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def run(self, x: Tensor) -> Tensor:
        h, hidden = self.rnn(self.layers(x.unsqueeze(-1)), self.hidden)
        self.hidden = tuple(state.detach() for state in hidden)
        return self.head(h[:, -1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.run(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self.run(batch[0]), batch[1]))


class OfOneTensor(Stateful):
    """Rows of the batch, added to the features of the next."""

    def run(self, x: Tensor) -> Tensor:
        h = self.layers(x.unsqueeze(-1)).mean(1)
        if self.hidden is not None:
            h = h + self.hidden
        self.hidden = h.detach()
        return self.head(h[:, :4])


class InAList(Stateful):
    def run(self, x: Tensor) -> Tensor:
        h = self.layers(x.unsqueeze(-1))
        hs = [h.mean(1), h[:, -1]]
        if self.hidden:
            hs = [mine + theirs for mine, theirs in zip(hs, self.hidden, strict=True)]
        self.hidden = [h.detach() for h in hs]
        return self.head(hs[0][:, 1:] * hs[1][:, :-1])


class InADict(Stateful):
    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.states: dict[str, Tensor] = {}

    def on_validation_epoch_start(self) -> None:
        self.states.clear()

    on_train_epoch_start = on_validation_epoch_start

    def run(self, x: Tensor) -> Tensor:
        h = self.layers(x.unsqueeze(-1)).mean(1)
        if "h" in self.states:
            h = h + self.states["h"]
        self.states["h"] = h.detach()
        return self.head(h[:, :4])


class OfTheBatch(Stateful):
    """The inputs of the batch before; no weights are in it."""

    def run(self, x: Tensor) -> Tensor:
        before, self.hidden = self.hidden, x
        if before is not None:
            x = 0.5 * (x + before)
        return self.head(self.layers(x.unsqueeze(-1)).mean(1)[:, :4])


class RunningVector(Stateful):
    """A mean over samples, that moves on with every batch."""

    def run(self, x: Tensor) -> Tensor:
        h = self.layers(x.unsqueeze(-1)).mean(1)
        mean = h.detach().mean(0)
        self.hidden = mean if self.hidden is None else 0.9 * self.hidden + 0.1 * mean
        return self.head((h - self.hidden)[:, :4])


class Cell(nn.Module):
    """A unit with a memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.memory: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        if self.memory is not None:
            h = h + 0.5 * self.memory
        self.memory = h.detach()
        return h


class InUnits(Stateful):
    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.cells = nn.ModuleList(Cell() for _ in range(4))

    def on_validation_epoch_start(self) -> None:
        for cell in self.cells:
            cell.memory = None

    on_train_epoch_start = on_validation_epoch_start

    def run(self, x: Tensor) -> Tensor:
        h = self.layers(x.unsqueeze(-1)).mean(1)
        for cell in self.cells:
            h = cell(h)
        return self.head(h[:, :4])


class InABuffer(Stateful):
    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.register_buffer("state", torch.zeros(1, 5))

    def run(self, x: Tensor) -> Tensor:
        h = self.layers(x.unsqueeze(-1)).mean(1) + self.state
        self.state = h.detach()
        return self.head(h[:, :4])


CARRIED = {
    Stateful: "self.hidden",
    OfOneTensor: "self.hidden",
    InAList: "self.hidden",
    InADict: "self.states",
    OfTheBatch: "self.hidden",
    RunningVector: "self.hidden",
    InUnits: r"self.cells.\d.memory",
}


def train(layout: Layout | None, kind: type[Stateful]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    losses: list[float] = []

    class Notes(kind):  # type: ignore[valid-type, misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))
            super().on_train_batch_end(outputs, batch, batch_idx)

    module = make(Notes)
    trainer = make_trainer(layout)
    trainer.fit(module, Sequences())
    state = module.hidden if isinstance(module.hidden, (list, tuple)) else [module.hidden]
    sums = [float(each.sum()) for each in state if each is not None]
    return [*losses, float(trainer.callback_metrics["val_loss"])], sums, whole_weights(module)  # sums on every rank


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", CARRIED, ids=lambda kind: kind.__name__)
def test_one_microbatch_carries_state_as_one_device_does(pool: WorkerPool, kind: type[Stateful]) -> None:
    check_with_weights(pool, train, ONE, kind)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("kind", CARRIED, ids=lambda kind: kind.__name__)
def test_several_microbatches_are_refused_with_name_and_line(pool: WorkerPool, kind: type[Stateful]) -> None:
    for message in pool.refusals("ConfigurationError", train, FOUR, kind, world_size=2, timeout=60):
        assert "num_microbatches=1" in message and "4 microbatches" in message
        assert "test_state_between_batches.py:" in message, message
        assert re.search(f"leaves a tensor in {CARRIED[kind]}, and the next step uses it", message)
        assert "validation_step" not in message.partition("leaves")[0]


class InValidation(Stateful):
    """Only the steps of validation keep a state."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hidden = None
        loss = super().training_step(batch, batch_idx)
        self.hidden = None
        return loss


def test_state_in_validation_is_refused_in_its_first_batch(pool: WorkerPool) -> None:
    for message in pool.refusals("ConfigurationError", train, FOUR, InValidation, world_size=2, timeout=60):
        assert "validation_step of Notes leaves a tensor in self.hidden" in message


class Center(nn.Module):
    """A loss that replaces its buffer, as that of DINO does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 3))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        loss = -((teacher - self.center).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()
        self.center = self.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1
        return loss


class Centers(Stateful):
    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.loss = Center()

    def run(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.unsqueeze(-1)).mean(1)[:, :4])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.run(batch[0])
        return self.loss(h, h.detach().flip(-1) * 2)

    def on_train_batch_end(self, *_: Any) -> None:  # on every rank
        self.hidden = self.loss.center


class CenterInPlace(Center):
    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        loss = -((teacher - self.center).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()
        self.center.mul_(0.9).add_(teacher.mean(0, keepdim=True), alpha=0.1)
        return loss


class CentersInPlace(Centers):
    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.loss = CenterInPlace()


@pytest.mark.parametrize("kind", [InABuffer, Centers, CentersInPlace])
def test_one_microbatch_carries_a_buffer_that_its_step_moves(pool: WorkerPool, kind: type[Stateful]) -> None:
    check_with_weights(pool, train, ONE, kind)


@pytest.mark.parametrize("kind", [Centers, CentersInPlace])
def test_several_microbatches_with_such_a_buffer_are_refused(pool: WorkerPool, kind: type[Stateful]) -> None:
    for message in pool.refusals("ConfigurationError", train, FOUR, kind, world_size=2, timeout=60):
        assert "leaves a tensor in self.loss.center, and the next step uses it" in message


class Counter(nn.Module):
    """A loss that counts its calls and its samples in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("signs", torch.zeros(2))

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.signs += torch.bincount((h[:, 0] > 0).long(), minlength=2)
        return h.square().mean()


class Counters(Centers):
    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.loss = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.run(batch[0]))

    def on_train_batch_end(self, *_: Any) -> None:
        self.hidden = [self.loss.calls, self.loss.signs[0]]


@pytest.mark.parametrize("layout", [ONE, FOUR], ids=str)
def test_a_loss_module_counts_batches_and_samples(pool: WorkerPool, layout: Layout) -> None:
    check_with_weights(pool, train, layout, Counters)


class NothingCarried(Stateful):
    """A cache, a list for a hook, the last outputs, a counter and a running mean: nothing that a pipeline cannot do."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.cache: Any = None
        self.kept: list[Tensor] = []
        self.last: Any = None
        self.num_steps = 0
        self.mean = 0.0

    def run(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype)
        self.num_steps += 1
        h = self.layers((x * self.cache).unsqueeze(-1)).mean(1)
        self.last = h.detach()
        self.last_batch = x
        self.kept.append(self.last)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean()
        return self.head(h[:, :4])

    def on_train_batch_end(self, *args: Any) -> None:
        self.hidden = [self.last_batch, self.last, *self.kept, self.mean]
        self.kept.clear()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [ONE, FOUR], ids=str)
def test_what_is_kept_otherwise_is_not_refused(pool: WorkerPool, layout: Layout) -> None:
    check_with_weights(pool, train, layout, NothingCarried)
