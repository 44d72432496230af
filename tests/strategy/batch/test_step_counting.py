"""Targets are counted by a trace of the step where that gives what a rehearsal does, and by rehearsals elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_run import whole_weights
from pipelined_fit import trainer as make_trainer
from pool import WorkerPool
from small_models import Descends
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.strategy.batch import counting
from lightning_pp.strategy.batch.counting import StepCounting

WORDS, LENGTH, MICROBATCHES, BATCHES = 11, 6, 4, 5


class Reader(Descends):
    """Predicts the next word; words of 0 are no targets. Subclasses write the loss in other ways."""

    lr = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, words: Tensor) -> Tensor:
        targets = torch.where(words[:, 1:] == 0, -100, words[:, 1:])
        return F.cross_entropy(self(words)[:, :-1].flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0])


class Padded(Reader):
    """As causal models of transformers shift their labels."""

    def loss(self, words: Tensor) -> Tensor:
        labels = F.pad(words, (0, 1), value=0)[..., 1:].contiguous().view(-1).to(words.device)
        return nn.CrossEntropyLoss(ignore_index=0)(self(words).view(-1, WORDS), labels)


class MaskedMean(Reader):
    """Divides by the sum of a mask itself."""

    def loss(self, words: Tensor) -> Tensor:
        mask = (words != 0).double()
        losses = F.cross_entropy(self(words).mT, words, reduction="none")
        return (losses * mask).sum() / mask.sum()


class WritesLabels(Reader):
    """Writes into its labels."""

    def loss(self, words: Tensor) -> Tensor:
        labels = words.clone()
        labels[words == 0] = -100
        labels[:, -1] = -100
        return F.cross_entropy(self(words).flatten(0, 1), labels.masked_fill_(words == 1, -100).flatten())


class WritesThroughView(Reader):
    """Writes into what shares memory with its labels, which no trace follows."""

    def loss(self, words: Tensor) -> Tensor:
        labels = words.clone()
        labels.view(-1)[::3] = 0
        return F.cross_entropy(self(words).flatten(0, 1), labels.flatten(), ignore_index=0)


class OfTable(Reader):
    """Looks its labels up in a table that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(WORDS))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.table = torch.arange(WORDS).masked_fill(torch.arange(WORDS) < 2 + batch_idx, -100)

    def loss(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self(words).flatten(0, 1), self.table[words].flatten())


class OfAttribute(Reader):
    """Leaves out a word that an attribute names, which changes twice."""

    left_out = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.left_out = batch_idx // 2

    def loss(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self(words).flatten(0, 1), words.flatten(), ignore_index=self.left_out)


class OfLengths(Reader):
    """Looks at values of the batch to cut it."""

    def loss(self, words: Tensor) -> Tensor:
        longest = int((words != 0).sum(1).max())
        logits = self(words)
        return F.cross_entropy(logits[:, :longest].flatten(0, 1), words[:, :longest].flatten(), ignore_index=0)


# how often a step is rehearsed to be counted in five batches of four microbatches
REHEARSALS = {Reader: 2, Padded: 2, MaskedMean: 2, WritesLabels: 2, OfAttribute: 6}
REHEARSALS |= dict.fromkeys((WritesThroughView, OfTable, OfLengths), 20)


def words() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(1, WORDS, (8 * BATCHES, LENGTH), generator=generator)
    left = torch.randint(1, LENGTH + 1, (8 * BATCHES, 1), generator=generator)
    return DataLoader(TensorDataset(rows * (torch.arange(LENGTH) < left)), batch_size=8)


def fitted(kind: type[Reader], strategy: Any = "auto", devices: int = 1) -> tuple[dict[str, Tensor], int]:
    """Weights after a fit, and how many rehearsals this rank has counted by."""
    number = 0
    rehearsed = StepCounting._rehearsed

    def counted(*args: Any) -> Any:
        nonlocal number
        number += 1
        return rehearsed(*args)

    StepCounting._rehearsed = counted  # type: ignore[method-assign]
    try:
        torch.manual_seed(5)
        module = kind()
        options: dict[str, Any] = {"precision": "64-true"}
        trainer = make_trainer(devices, strategy, **options)
        trainer.fit(module, words())
        return whole_weights(module), number
    finally:
        StepCounting._rehearsed = rehearsed  # type: ignore[method-assign]


def fit_in_pipeline(kind: type[Reader]) -> tuple[dict[str, Tensor], int]:
    strategy = PipelineParallelStrategy(2, num_microbatches=MICROBATCHES, check_first_batches=False)
    return fitted(kind, strategy, devices=2)


@pytest.mark.by_day(4)
@pytest.mark.parametrize("kind", REHEARSALS, ids=lambda kind: kind.__name__)
def test_counts_are_those_of_the_whole_batch(pool: WorkerPool, kind: type[Reader]) -> None:
    expected, _ = fitted(kind)
    ranks = pool.run(fit_in_pipeline, kind, world_size=2)
    assert [number for _, number in ranks] == [0, REHEARSALS[kind]]
    for weights, _ in ranks:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9)


class OfSettings(Reader):
    """Leaves out a word that an object names; nobody can see that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(left_out=0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.settings.left_out = batch_idx // 3

    def loss(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self(words).flatten(0, 1), words.flatten(), ignore_index=self.settings.left_out)


def message_of_settings() -> str:
    counting._USES_BETWEEN_CHECKS = 3
    try:
        fit_in_pipeline(OfSettings)
    except Exception as error:
        return str(error)
    return "no error"


def test_a_trace_that_is_wrong_later_is_an_error(pool: WorkerPool) -> None:
    messages = pool.run(message_of_settings, world_size=2)
    assert "divides by another quantity of the batch than in earlier batches" in messages[1]
