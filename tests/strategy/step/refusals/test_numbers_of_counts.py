"""Numbers that Python makes of counts in validation, where the first microbatches count nothing."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from parity_run import QUIET, Layout
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LAYOUT = Layout("1f1b", 2, 1, 4)


class Counts(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Item(Counts):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, mask = batch
        hits = (self(x)[:, 0] > 0) & mask
        self.log("accuracy", hits.sum() / max(mask.sum().item(), 1))


class TwoQuotients(Counts):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, mask = batch
        h, number = self(x), max(int(mask.sum()), 1)
        self.log("loss", (h.square().mean(1) * mask).sum() / number)  # the line
        self.log("accuracy", ((h[:, 0] > 0) & mask).sum() / number)


def validated(kind: type[Counts], layout: Layout | None, masks: list[int]) -> dict[str, float]:
    torch.manual_seed(7)
    x = torch.randn(16, 8, dtype=torch.float64)
    mask = torch.tensor(masks).bool().repeat(2)
    devices, strategy = (1, "auto") if layout is None else (layout.world_size, layout.strategy())
    trainer = L.Trainer(**{**QUIET, "devices": devices, "strategy": strategy, "precision": "64-true"}, max_epochs=1)
    torch.manual_seed(8)
    loaders = DataLoader(TensorDataset(x, mask), 8), DataLoader(TensorDataset(x, mask), 8)
    trainer.fit(kind(), *loaders)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("masks", [[0, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1, 1]])
def test_a_number_that_item_reads_goes_with_the_batch(pool: WorkerPool, masks: list[int]) -> None:
    expected = validated(Item, None, masks)
    assert 0 < expected["accuracy"] < 1
    for found in pool.run(validated, Item, LAYOUT, masks, world_size=2):
        assert found == pytest.approx(expected, rel=1e-12)


def test_numbers_that_do_not_add_up_are_told_with_their_line(pool: WorkerPool) -> None:
    report = pool.run(validated, TwoQuotients, LAYOUT, [0, 0, 1, 1, 1, 0, 1, 1], world_size=2, expect_failure=True)
    told = "\n".join(failure.message for failure in report.failures if failure)
    lines, start = inspect.getsourcelines(TwoQuotients)
    (number,) = [start + index for index, line in enumerate(lines) if "# the line" in line]
    assert f"{__file__}:{number} in validation_step calculates with a number that Python made of a count" in told
    assert "other counts" not in told
