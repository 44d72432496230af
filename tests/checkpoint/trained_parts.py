"""Short trainings with a checkpoint in them, for the tests of what the strategy saves and loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pp import PipelineParallelStrategy

WIDTH = 6


class Stack(pl.LightningModule):
    """A residual stack on vectors, with dropout if wanted."""

    def __init__(self, dropout: float = 0.0, num_blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.tensor(0.5))
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + self.scale * self.dropout(torch.tanh(block(x)))
        return nn.functional.mse_loss(self.head(x).squeeze(-1), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def loader(replicas: int = 1, batch_size: int = 4) -> DataLoader[Any]:
    """Sixteen samples in batches of four, of all replicas together."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, WIDTH, generator=generator, dtype=torch.float64)
    samples = TensorDataset(x, x.sum(-1).tanh())
    rank = int(os.environ.get("RANK", 0)) % replicas
    sampler = DistributedSampler(samples, replicas, rank, shuffle=False)
    return DataLoader(samples, batch_size=batch_size // replicas, sampler=sampler)


def make_trainer(layout: tuple[int, int] | None, folder: Path, options: Any = None, **arguments: Any) -> pl.Trainer:
    """A float64 trainer on ``(pipeline, data-parallel)`` ranks, or on one device for None."""
    where: dict[str, Any] = {"devices": 1}
    if layout is not None:
        pipeline, replicas = layout
        strategy = PipelineParallelStrategy(pipeline, replicas, num_microbatches=2, schedule="1f1b", **(options or {}))
        where = {"devices": pipeline * replicas, "strategy": strategy}
    settings = {
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "precision": "64-true",
        "use_distributed_sampler": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(accelerator="cpu", **where, **{**settings, **arguments})


def weights(module: nn.Module) -> dict[str, Tensor]:
    """This rank's parameters and buffers, whole."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in named.items()
    }


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The weights of all ranks."""
    return {name: value for part in parts for name, value in part.items()}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)
