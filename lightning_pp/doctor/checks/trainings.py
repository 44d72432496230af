"""Small trainings, by a pipeline through Lightning's Trainer and on one device by a plain loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_pp.doctor.findings import Rank
from lightning_pp.strategy.strategy import PipelineParallelStrategy

Batch = tuple[Tensor, Tensor]
_TIMEOUT = timedelta(seconds=30)
_WIDTH = 32


class Block(nn.Module):
    """``[B, D]`` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + change


class Chain(pl.LightningModule):
    """A residual stack whose units can be cut anywhere.

    Args:
        num_blocks: Units besides the first and the last.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        # in mixed precision only what comes of weights is cast, so that a norm does not come first
        self.stem = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        predicted: Tensor = self.head(x)
        return predicted

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x).float(), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Notes(pl.Callback):
    """Losses by batch, and in the end the parameters of this rank, whole, by name.

    Attributes:
        losses: What the step returned.
        weights: On the host.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for name, parameter in module.named_parameters():
            value = parameter.detach()
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            self.weights[name] = whole.to("cpu", torch.float64, copy=True)


def num_blocks_for(rank: Rank) -> int:
    """Enough for two stages on each rank."""
    return 2 * rank.num_ranks + 1


def batches(number: int, size: int = 8) -> list[Batch]:
    """Batches of one device, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, size, _WIDTH, generator=generator)) for _ in range(number)]


def batches_for_replica(whole: Sequence[Batch], replica: int, replicas: int) -> list[Batch]:
    """What one of the replicas sees of them."""
    return [(x[replica::replicas].contiguous(), y[replica::replicas].contiguous()) for x, y in whole]


def trainer_for(rank: Rank, *, callbacks: list[pl.Callback], precision: Any = "32-true", **options: Any) -> pl.Trainer:
    """A Trainer over all ranks; ``options`` are the strategy's."""
    strategy = PipelineParallelStrategy(
        **{"pipeline_parallel_size": rank.num_ranks, "num_microbatches": 4, "timeout": _TIMEOUT, **options}
    )
    return pl.Trainer(
        accelerator="gpu" if rank.device.type == "cuda" else "cpu",
        devices=rank.num_ranks_here,
        num_nodes=rank.num_ranks // rank.num_ranks_here,
        strategy=strategy,
        precision=precision,
        callbacks=callbacks,
        plugins=[TorchElasticEnvironment()],  # also within an allocation of Slurm, of which these are no tasks
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=rank.folder,
        max_epochs=1,
    )


def loader(data: Sequence[Batch]) -> DataLoader[Any]:
    """Batches as they are."""
    return DataLoader(list(data), batch_size=None)  # type: ignore[arg-type]


def train_alone(module: Chain, data: Sequence[Batch], device: torch.device, *, bf16: bool) -> Notes:
    """The same on one device, by a loop."""
    notes = Notes()
    module.to(device)
    optimizer = module.configure_optimizers()
    for number, (x, y) in enumerate(data):
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            loss = module.training_step((x.to(device), y.to(device)), number)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        notes.losses.append(float(loss))
    notes.on_train_end(None, module)  # type: ignore[arg-type]
    return notes


def difference(found: Notes, expected: Notes, start: Chain) -> tuple[float, str]:
    """The largest difference of what parameters of this rank have moved by, as a share of that, and whose it is.

    A training that did not take place differs by infinity.
    """
    before = {name: parameter.detach().to("cpu", torch.float64) for name, parameter in start.named_parameters()}
    worst = (0.0, "") if found.weights else (math.inf, "nothing that was trained")
    for name, weight in found.weights.items():
        moved = (expected.weights[name] - before[name]).norm()
        share = float((weight - expected.weights[name]).norm() / moved.clamp(min=1e-12))
        worst = max(worst, (share if math.isfinite(share) else math.inf, name))
    return worst
