"""Short trainings with a checkpoint in them, for the tests of what the strategy saves and loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from small_models import WIDTH
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pp import PipelineParallelStrategy


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
        strategy = PipelineParallelStrategy(
            pipeline, replicas, num_microbatches=2, schedule="1f1b", check_first_batches=False, **(options or {})
        )
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
