"""Modules and data that tests of verification train."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy


class Net(L.LightningModule):
    """Four blocks with dropout and a buffer, Adam, and a learning rate that falls at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4))
        self.last = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ReadsWorldSize(Net):
    """From the third batch on its loss depends on the number of processes."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        if batch_idx >= 2:
            loss = loss * self.trainer.world_size
        self.log("train_loss", loss)
        return loss


class Sampling(Net):
    """Draws in validation only."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        found = self(batch[0])
        self.log("val_loss", nn.functional.mse_loss(found + torch.randn_like(found), batch[1]))


class NumPyRate(Net):
    """Its learning rate is a number of NumPy, another than on one device."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), np.float64(0.01 * self.trainer.world_size))


class Contrastive(Net):
    """Its loss is over pairs of samples, which a pipeline refuses."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        return (out @ out.T).logsumexp(1).mean()


class Data(L.LightningDataModule):
    """Shuffled training data, and validation data in order."""

    def __init__(self, num_samples: int = 64) -> None:
        super().__init__()
        x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(1))
        self.dataset = TensorDataset(x, x.sum(1, keepdim=True).sin())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=8)


class OwnGenerator(Data):
    """The loader shuffles by a generator of its own, with a seed of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5))


class InPlace:
    """A sampler that shuffles one list again and again, by a generator of its own."""

    def __init__(self, num_samples: int) -> None:
        self.order, self.generator = list(range(num_samples)), random.Random(0)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        self.generator.shuffle(self.order)
        return iter(self.order)


class ShuffledInPlace(Data):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=8, sampler=InPlace(len(self.dataset)))


def make_strategy() -> PipelineParallelStrategy:
    return PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=4)


class Double(Net):
    """Cannot be trained in float64."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("no kernel for float64")
        return super().forward(x)


class Counting(L.Callback):
    """Adds up the losses, and keeps the sum in checkpoints."""

    def __init__(self) -> None:
        self.total = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.total += float(outputs["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]


class Normalised(Net):
    """With a BatchNorm, which in training normalises over what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Noting(torch.optim.SGD):
    """Keeps a momentum, and from the third step on the number of processes, which no update reads."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] >= 3:
                state["noted"] = torch.full((2,), float(os.environ.get("WORLD_SIZE", "1")))
        return result


class NotesProcesses(Net):
    """Differs from one device in its optimizer's state only."""

    def configure_optimizers(self) -> Any:
        return Noting(self.parameters(), 0.01, momentum=0.9)


class CountsBatches(Net):
    """Non-persistent buffers: one between units, and one of a block that ``number`` or the processes are added to."""

    number: int | None = 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1), persistent=False)
        for block in self.blocks:
            block.register_buffer("seen", torch.zeros(3), persistent=False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.largest.clamp_(min=batch[0].max())
        for block in self.blocks:
            block.seen[1] += self.number or self.trainer.world_size


class UsesLogger(CountsBatches):
    """Hands numbers to the Trainer's logger itself, which ``Trainer()`` has by default, and reads where it writes."""

    def on_validation_epoch_end(self) -> None:
        logger: Any = self.logger
        logger.log_metrics({"scale": 1.0}, step=self.trainer.global_step)
        log_dir: Any = self.trainer.log_dir
        logger.experiment.add_text("folder", str(Path(log_dir, "texts")))


class CountsProcesses(CountsBatches):
    """Differs from one device in non-persistent buffers only."""

    number = None
