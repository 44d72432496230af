"""Ranks whose steps would send one another different tensors end with an error, before anything is sent."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from feature_parts import make_unchecked_trainer as make_trainer
from parity_run import Layout
from pool import WorkerPool
from small_models import Blocks
from test_unequal_data import Rows
from torch import Tensor
from torch.utils.data import DataLoader

PIPELINE = Layout("1f1b", 2, 1, 2)
MESSAGE = (
    r"after 0 updates: The ranks of one pipeline planned different messages for batch 0 of training_step.*"
    r"Rank 0 expects .*float64 of shape \(2, 8\), from stage 0 to stage 1.*"
    r"Rank 1 expects .*float64 of shape \(3, 8\), from stage 0 to stage 1.*Nothing was sent"
)
STANDSTILL = r"after 2 updates: .*waited for the others for 3 s or longer \(deadlock_seconds\)"


class OtherOnRank1(Blocks):
    """From a batch on, rank 1 gives its blocks a row more."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.num_updates = first, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if batch_idx >= self.first and self.global_rank == 1:
            x, y = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])
        return super().training_step((x, y), batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.num_updates += 1


def fit(first: int) -> None:
    module = OtherOnRank1(first)
    try:
        trainer = make_trainer(PIPELINE, strategy=PIPELINE.strategy(check_first_batches=False, deadlock_seconds=3))
        trainer.fit(module, DataLoader(Rows(16), batch_size=4))
    except Exception as error:
        raise RuntimeError(f"after {module.num_updates} updates: {error}") from None


@pytest.mark.parametrize(("first", "expected"), [(0, MESSAGE), (2, STANDSTILL)])
def test_ranks_that_plan_different_messages(pool: WorkerPool, first: int, expected: str) -> None:
    """Where one rank goes by a plan that it knows, the other compares its new one with nobody."""
    report = pool.run(fit, first, world_size=2, timeout=150.0, expect_failure=True)
    for failure in report.failures:
        assert failure is not None and re.search(expected, failure.message, re.DOTALL), failure


class LogsOnRank0(Blocks):
    """Logs on one rank alone, which does not have the last stage; or validates there alone."""

    def __init__(self, validates_alone: bool) -> None:
        super().__init__()
        self.validates_alone = validates_alone

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.trainer.is_global_zero:
            self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.validates_alone or self.global_rank == 0:
            self.log("val_loss", self.loss(batch))


def fit_on_rank_0(validates_alone: bool) -> None:
    trainer = make_trainer(PIPELINE, strategy=PIPELINE.strategy(), num_sanity_val_steps=1)
    trainer.fit(LogsOnRank0(validates_alone), *[DataLoader(Rows(16), batch_size=4)] * 2)


@pytest.mark.parametrize(
    ("validates_alone", "expected"),
    [
        (False, "of training_step. Rank 0 expects self.log of 'train_loss'. Rank 1 expects nothing more."),
        (True, "of validation_step. Rank 0 expects result"),
    ],
)
def test_what_one_rank_does_alone_is_refused(pool: WorkerPool, validates_alone: bool, expected: str) -> None:
    report = pool.run(fit_on_rank_0, validates_alone, world_size=2, timeout=60.0, expect_failure=True)
    for failure in report.failures:
        assert failure is not None and f"planned different messages for batch 0 {expected}" in failure.message
