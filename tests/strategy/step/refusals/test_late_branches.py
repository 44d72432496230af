"""What is checked besides the first batches of a fit: branches that come late, tests and predictions."""

from __future__ import annotations

import random
import re
import sys
import textwrap
import warnings
from typing import Any

import pytest
import torch
from parity_run import Layout
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Losses, Residual
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp.strategy.batch import checks

NUM_BATCHES, LATE, BATCH_SIZE, RARE = 6, 4, 8, 3
LARGE = 20.0


class Late(Residual):
    """Does something else from a batch on, or for samples that come late."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h, labels = self(batch[0]), batch[1]
        return self.loss(h, nn.functional.cross_entropy(h, labels, reduction="none"), labels == RARE)

    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        raise NotImplementedError


class ComparesSamples(Late):
    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        extra = torch.logsumexp(h @ h.T, -1).mean() if self.global_step >= LATE else 0.0
        return losses.mean() + extra


class ReplacesTheLoss(Late):
    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        return h.var() if self.global_step >= LATE else losses.mean()


class LosesAMicrobatch(Late):
    """On one device only a batch without rare samples is lost."""

    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        rare = losses[are_rare]
        return losses.sum() * 0 if len(rare) == 0 else losses.sum() / len(rare)


class LosesAMicrobatchByNumber(Late):
    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        return losses.sum() * 0 if int(are_rare.sum()) == 0 else losses.sum() / are_rare.sum()


class LosesABatch(Late):
    """The same of a tensor, which is the count of the batch."""

    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        count = are_rare.sum()
        return losses.sum() * 0 if count == 0 else losses.sum() / count


class LogsOnTheFirstRank(Late):
    """The branch has no effect on the loss, and no other rank takes it."""

    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        if self.trainer.is_global_zero and self.global_step >= LATE:
            self.log("spread", h.detach().square().mean(), rank_zero_only=True)
        return losses.mean()


class AddsAMean(Late):
    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        extra = h.square().mean() if self.global_step >= LATE else 0.0
        return losses.mean() + extra


class DampsALargeLoss(Late):
    """The batch decides on one device, and the last half of a late batch has large losses."""

    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        loss = losses.mean()
        if loss > LARGE:
            loss = loss * 0.1
        return loss


class DampsALargeNumber(Late):
    """The same by a number that Python has read before, and in an expression."""

    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        loss = losses.mean()
        number = loss.item()
        self.last_number = round(number, 3)
        return loss * (0.1 if number > LARGE else 1.0)


class DampsInAFunction(Late):
    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        loss = losses.mean()
        return damped(loss, max(losses.tolist()))


def damped(loss: Tensor, largest: float) -> Tensor:
    if largest > 5 * LARGE:
        return loss * 0.1
    return loss


class DampsAnyLoss(Late):
    """All microbatches decide alike."""

    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        loss = losses.mean()
        assert not torch.isnan(losses).any()
        while loss > 1e-6:
            loss = loss * 1e-12
        return loss


def loader(alone_before: bool = False) -> DataLoader[Any]:
    """Every second sample is rare; in the last half of a late batch none is, and its losses are large.

    With ``alone_before`` the batch before has no others.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(NUM_BATCHES * BATCH_SIZE, 8, generator=generator)
    labels = torch.randint(RARE, (len(x),), generator=generator)
    labels[::2] = RARE
    first = (LATE - 1) * BATCH_SIZE if alone_before else LATE * BATCH_SIZE + BATCH_SIZE // 2
    for begin in {first, LATE * BATCH_SIZE + BATCH_SIZE // 2}:
        end = (begin // BATCH_SIZE + 1) * BATCH_SIZE
        labels[begin:end] = 0
        x[begin:end] *= 1000
    return DataLoader(TensorDataset(x, labels), batch_size=BATCH_SIZE)


def train(kind: type[Late], layout: Layout | None, alone_before: bool = False) -> tuple[list[float], str]:
    """In a worker: the losses of batches that were trained, and the error that ended it."""
    module, updates = kind(), Losses()
    options: dict[str, Any] = {"precision": "64-true", "callbacks": [updates], "use_distributed_sampler": False}
    run = trainer(1, "auto", **options) if layout is None else trainer(layout.world_size, layout.strategy(), **options)
    try:
        run.fit(module, loader(alone_before))
    except Exception as error:
        return updates.losses, f"{error} {getattr(error, '__notes__', '')}"
    return updates.losses, ""


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [Layout("1f1b", 2, num_microbatches=4), Layout("zb_v", 2, 2, 2)], ids=str)
@pytest.mark.parametrize(
    ("kind", "alone_before"),
    [
        (ComparesSamples, False),
        (ReplacesTheLoss, False),
        *((kind, alone) for kind in (LosesAMicrobatch, DampsALargeLoss, DampsALargeNumber) for alone in (False, True)),
        (LosesAMicrobatchByNumber, False),
        (DampsInAFunction, False),
    ],
)
def test_is_refused_before_its_batch_is_trained(
    pool: WorkerPool, kind: type[Late], alone_before: bool, layout: Layout
) -> None:
    expected, _ = pool.run(train, kind, None, alone_before, world_size=1, timeout=60)[0]
    for losses, error in pool.run(train, kind, layout, alone_before, world_size=layout.world_size, timeout=120):
        assert losses == pytest.approx(expected[:LATE], rel=1e-9)
        assert "The loss of training_step" in error and "depends on how the batch is cut" in error, error
        by_weights = re.search(
            r"A part takes another branch at .*test_late_branches.py:\d+ in (loss|damped) than", error
        )
        assert bool(by_weights) == kind.__name__.startswith("Damps"), error
        assert f"Batch {LATE} was checked because training_step took a new branch in it." in error


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [Layout("1f1b", 2, num_microbatches=4), Layout("zb_v", 2, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", [LosesABatch, LogsOnTheFirstRank, AddsAMean, DampsAnyLoss])
def test_trains_as_on_one_device_where_it_adds_up(pool: WorkerPool, kind: type[Late], layout: Layout) -> None:
    expected, _ = pool.run(train, kind, None, world_size=1, timeout=60)[0]
    for losses, error in pool.run(train, kind, layout, world_size=layout.world_size, timeout=120):
        assert error == "" and losses == pytest.approx(expected, rel=1e-9)


class ReadsANumber(Late):
    """Reads a number, loops and branches in each microbatch alike; a function of a library branches otherwise."""

    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        number = losses.mean().item()
        largest = max(loss for loss in losses.tolist() if loss >= 0)
        self.last = largest - number if largest > 0 else 0.0
        textwrap.wrap("a " * self.global_step * random.randint(1, 9))
        return losses.mean()


def checks_of_reading(has_debugger: bool) -> tuple[int, bool]:
    """In a worker: how many batches are checked late, and whether who is told of each line stays the same."""
    checked = []

    def debug(frame: Any, event: str, arg: Any) -> None:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks.BatchChecks, "check_part", lambda *args: checked.append(args))
        before = sys.gettrace()
        sys.settrace(debug if has_debugger else before)
        try:
            run = trainer(2, Layout("1f1b", 2, num_microbatches=4).strategy(), precision="64-true", max_epochs=3)
            run.fit(ReadsANumber(), loader())
            return len(checked), sys.gettrace() is (debug if has_debugger else before)
        finally:
            sys.settrace(before)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("has_debugger", [False, True])
def test_a_step_that_reads_a_number_is_not_checked_again(pool: WorkerPool, has_debugger: bool) -> None:
    assert pool.run(checks_of_reading, has_debugger, world_size=2, timeout=60) == [(0, True)] * 2


class DropsLayers(Late):
    """Its microbatches take ever new branches."""

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.2:
                h = h + torch.tanh(block(h))
        return h

    def loss(self, h: Tensor, losses: Tensor, are_rare: Tensor) -> Tensor:
        return losses.mean()


def warnings_of_dropped_layers(most: int) -> list[str]:
    """In a worker: a training in which so many batches with new branches are checked."""
    torch.manual_seed(3)
    run = trainer(2, Layout("1f1b", 2, num_microbatches=4).strategy(), precision="64-true")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(checks, "MOST_LATE_CHECKS", most)
        run.fit(DropsLayers(), loader())
    return [str(each.message) for each in caught if "no check had seen" in str(each.message)]


def test_branches_that_are_always_new_are_checked_a_number_of_times(pool: WorkerPool) -> None:
    (told,), _ = pool.run(warnings_of_dropped_layers, 2, world_size=2, timeout=60)
    assert told.startswith("In 2 batches training_step took branches that no check had seen."), told


class Evaluates(Late):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("spread", self(batch[0]).var(0).sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Tensor = self(batch[0])
        return h - h.mean(0)


def evaluate(layout: Layout) -> list[str]:
    """In a worker: what is warned of in a test and in a prediction."""
    run = trainer(layout.world_size, layout.strategy(), precision="64-true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.test(Evaluates(), loader(), verbose=False)
        run.predict(Evaluates(), loader())
    return [str(each.message) for each in caught if "depends on how the batch is cut" in str(each.message)]


def test_a_test_and_a_prediction_are_checked(pool: WorkerPool) -> None:
    tested, predicted = pool.run(evaluate, Layout("1f1b", 2, num_microbatches=4), world_size=2, timeout=60)[0]
    assert tested.startswith("The value that test_step logs as 'spread'") and "by `var`" in tested, tested
    assert predicted.startswith("A value that predict_step returns") and "by `sub`" in predicted, predicted
    assert "num_microbatches=1" in predicted and "whole_batch_loss" not in predicted, predicted
