"""What is wrong in the first batch is told by the error that one device raises, on the rank where it happens."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from parity_run import QUIET, Layout
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor

from lightning_pp.errors import NonFiniteError


class Raises(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if loss.isfinite():
            raise KeyError("no such thing")
        return loss


class LogsText(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("name", "text")  # type: ignore[arg-type]
        return self.loss(batch)


class NoLoader(Blocks):
    def train_dataloader(self) -> Any:
        return 5


class NeedsAllRows(Blocks):
    """As ``pad_packed_sequence`` does without ``total_length``: what it adds has as many rows as a whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) + torch.ones(BATCH_SIZE)).mean()


class NotANumber(Blocks):
    factor = float("nan")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).sum() * self.factor


class Infinite(NotANumber):
    factor = float("inf")


def error_of(kind: type[Blocks], layout: Layout | None) -> tuple[str, str, list[str]]:
    strategy, devices = ("auto", 1) if layout is None else (layout.strategy(), layout.world_size)
    run = L.Trainer(**QUIET, devices=devices, max_epochs=1, strategy=strategy)
    with pytest.raises(Exception) as found:  # noqa: PT011
        run.fit(kind(), None if kind is NoLoader else loader())
    return type(found.value).__name__, str(found.value), getattr(found.value, "__notes__", [])


BATCH_SIZE = 4
LAYOUT = Layout("1f1b", 2, 1, 2)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("kind", [Raises, LogsText, NoLoader])
def test_the_error_is_that_of_one_device(pool: WorkerPool, kind: type[Blocks]) -> None:
    name, text, _ = error_of(kind, None)
    assert error_of(kind, Layout("1f1b", 1, 1, 1))[:2] == (name, text)
    of_ranks = pool.run(error_of, kind, LAYOUT, world_size=2)
    assert (name, text) in [found[:2] for found in of_ranks]
    assert all(name in (found[0], *found[1].split()) or f"{name}:" in found[1] for found in of_ranks)


def test_a_step_that_fails_in_the_check_is_told_of_it(pool: WorkerPool) -> None:
    of_ranks = pool.run(error_of, Raises, LAYOUT, world_size=2)
    assert any("check_first_batches=False turns this check off" in note for *_, notes in of_ranks for note in notes)


def test_code_that_needs_all_rows_is_told_of_the_cut(pool: WorkerPool) -> None:
    of_ranks = pool.run(error_of, NeedsAllRows, LAYOUT, world_size=2)
    assert all(name == "RuntimeError" for name, *_ in of_ranks)
    assert any(
        "The batch was cut into 2 microbatches along dimension 0." in note for *_, notes in of_ranks for note in notes
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", [NotANumber, Infinite])
def test_a_loss_that_is_not_finite_is_told_as_such(pool: WorkerPool, kind: type[Blocks]) -> None:
    of_ranks = pool.run(error_of, kind, LAYOUT, world_size=2)
    assert {name for name, *_ in of_ranks} == {NonFiniteError.__name__}
    assert all("The loss of microbatch" in text for _, text, _ in of_ranks)
