"""Steps get the arguments that Lightning gives them, in the dry run too, whatever runs first, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from feature_parts import Data, check_on_every_rank, make
from feature_parts import make_unchecked_trainer as make_trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from parity_run import Layout
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor
from torch.nn.functional import cross_entropy

TWO_STAGES = Layout("1f1b", 2, 1, 2)


class AnyArguments(Classifier):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any) -> Any:
        return super().validation_step(*args[:2])


class BatchAlone(Classifier):
    def training_step(self, batch: Any, **kwargs: Any) -> Any:
        assert not kwargs
        return super().training_step(batch, 0)


class NamesOfLoaders(Classifier):
    """No default for the index of the loader, as many published modules."""

    names = ("first", "second")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log(self.names[dataloader_idx], cross_entropy(self(batch[0]), batch[1]) + dataloader_idx)

    def test_step(self, *args: Any) -> None:
        batch, _, dataloader_idx = args
        self.log(self.names[dataloader_idx], cross_entropy(self(batch[0]), batch[1]) + dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        return self(batch[0]) + dataloader_idx


class TwoLoaders(Data):
    def val_dataloader(self) -> Any:
        return [self.loader(10, 4, 2), self.loader(6, 4, 3)]

    test_dataloader = predict_dataloader = val_dataloader


class CallsNoLayer(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch[0].mean())


def fitted(layout: Layout | None, kind: type[Classifier]) -> Any:
    module, trainer = make(kind), make_trainer(layout)
    trainer.fit(module, Data())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def run_first(layout: Layout | None, kind: type[Classifier], loop: str, data: Callable[[], Any]) -> Any:
    return getattr(make_trainer(layout), loop)(make(kind), data())


@pytest.mark.parametrize("kind", [AnyArguments, pytest.param(BatchAlone, marks=pytest.mark.nightly)])
def test_training(pool: WorkerPool, kind: type[Classifier]) -> None:
    check_on_every_rank(pool, fitted, TWO_STAGES, kind)
    check_on_every_rank(pool, fitted, Layout("zb_h1", 3, 1, 2), kind)


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_index_of_the_loader_without_a_fit(pool: WorkerPool, loop: str) -> None:
    assert len(check_on_every_rank(pool, run_first, TWO_STAGES, NamesOfLoaders, loop, TwoLoaders)) == 2


def test_no_layer(pool: WorkerPool) -> None:
    for message in pool.refusals(None, run_first, TWO_STAGES, CallsNoLayer, "test", Data, world_size=2):
        assert "calls no layer, so it does not show how to cut the model" in message


class Batches:
    """An iterable that is no DataLoader."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.items = [
            (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
            for _ in range(number)
        ]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class OfTwo(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.of_any(batch)
        self.log("train_loss", loss)
        return loss

    def of_any(self, batch: Any) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        return torch.stack([cross_entropy(self(x), y) for x, y in parts]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("loss", self.of_any(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])


def combined(layout: Layout | None, loop: str, mode: Any) -> Any:
    trainer, loaders = make_trainer(layout), CombinedLoader({"a": Batches(3, 1), "b": Batches(4, 2)}, mode)
    result = getattr(trainer, loop)(make(OfTwo), loaders)
    return result or {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("loop", "mode"),
    [
        ("fit", "min_size"),
        ("fit", "max_size_cycle"),
        ("validate", "sequential"),
        ("validate", "max_size_cycle"),
        ("test", "min_size"),
        ("predict", "sequential"),
    ],
)
def test_combined_iterables(pool: WorkerPool, loop: str, mode: str) -> None:
    assert check_on_every_rank(pool, combined, TWO_STAGES, loop, mode)
