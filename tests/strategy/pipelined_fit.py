"""What the strategy's tests do with a small module in worker processes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy


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
