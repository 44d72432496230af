"""A small module and what the strategy's tests do with it in worker processes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy


class Blocks(pl.LightningModule):
    """A residual stack on vectors; subclasses misbehave."""

    def __init__(self, num_blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(num_samples: int = 12, batch_size: int = 4, width: int = 8, seed: int = 1) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, width, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=batch_size)


def trainer(devices: int = 2, strategy: Any = None, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy or PipelineParallelStrategy(pipeline_parallel_size=devices, num_microbatches=2),
        **{**settings, **options},
    )


def fit(module: pl.LightningModule, devices: int = 2, strategy: Any = None, **options: Any) -> pl.Trainer:
    run = trainer(devices, strategy, **options)
    run.fit(module, loader())
    return run
