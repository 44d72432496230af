"""Steps that draw from every generator between units, and drop layers by what they drew."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks, Losses
from torch import Tensor, nn

from lightning_pp import PipelineParallelStrategy


class Echo(nn.Linear):
    """Gives its second input on, by way of the stage that it runs on."""

    def forward(self, x: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), drawn * 1.0


class Drawing(Blocks):
    """LayerDrop, with noise from Python, NumPy and torch that the first and the last stage both look at."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        self.blocks[0] = Echo(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        h, echo = self.blocks[0](x, drawn)
        for block in self.blocks[1:]:
            if random.random() < 0.7:
                h = h + torch.tanh(block(h))
        self.log("difference", (echo - drawn).abs().max())
        return nn.functional.mse_loss(self.head(h * drawn.mean()).squeeze(-1), y)


class Notes(Losses):
    def __init__(self) -> None:
        super().__init__()
        self.differences: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.differences.append(float(trainer.callback_metrics["difference"]))


def train(seeds: list[int]) -> list[tuple[list[float], list[float]]]:
    """In a worker: for each seed the losses of a training, and how far the stages' draws were apart."""
    runs = []
    for seed in seeds:
        found, module = Notes(), Drawing()
        pl.seed_everything(seed, verbose=False)  # the module's constructor seeds as well
        strategy = PipelineParallelStrategy(2, num_microbatches=2, check_first_batches=False)
        trainer(2, strategy, callbacks=[found]).fit(module, loader(num_samples=12))
        runs.append((found.losses, found.differences))
    return runs


def test_a_seed_gives_one_run_and_all_stages_draw_the_same(pool: WorkerPool) -> None:
    here, there = pool.run(train, [3, 3, 4], world_size=2, timeout=60)
    assert here == there
    (first, _), (again, _), (other, _) = here
    assert first == again
    assert len(set(first)) == 3
    assert not set(first) & set(other)
    assert {difference for _, differences in here for difference in differences} == {0.0}
