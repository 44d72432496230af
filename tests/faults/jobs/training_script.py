"""A script that trains a small module as a user's would, and meets what its argument, a JSON object, asks for.

Every rank writes ``losses-RANK.jsonl`` (a line per batch: number in the run and loss) into ``folder``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8
BATCHES_PER_EPOCH = 6


class ResumableLoader(DataLoader[Any]):
    """Goes on where it stood when its state was taken."""

    start = position = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.position = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


def loader() -> ResumableLoader:
    x = torch.randn(4 * BATCHES_PER_EPOCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return ResumableLoader(TensorDataset(x, x.sum(-1, keepdim=True).tanh()), batch_size=4)


class Regression(pl.LightningModule):
    """Two hidden layers; meets ``event`` on ``ranks`` in the step of the batch ``at``."""

    def __init__(self, event: str | None = None, ranks: tuple[int, ...] = (), at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)
        self.event, self.ranks, self.at = event, ranks, at
        self.has_met = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.meet(batch_idx)
        x, y = batch
        hidden = self.second(torch.tanh(self.first(x)))
        return nn.functional.mse_loss(self.last(torch.tanh(hidden)), y)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))

    def meet(self, batch_idx: int) -> None:
        number = batch_idx + BATCHES_PER_EPOCH * self.trainer.current_epoch
        if self.event is None or self.global_rank not in self.ranks or number != self.at or self.has_met:
            return
        self.has_met = True
        if self.event == "exit":
            sys.exit(0)
        os.kill(os.getpid(), getattr(signal, self.event))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Losses(pl.Callback):
    """Writes the losses, and takes its time after every batch."""

    def __init__(self, folder: Path, pause_s: float = 0.0) -> None:
        self.folder, self.pause_s = folder, pause_s

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        with (self.folder / f"losses-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.fit_loop.total_batch_idx, float(outputs["loss"])]) + "\n")
        time.sleep(self.pause_s)


class SlowLogger(DummyLogger):
    """Takes a minute at the end, as one that uploads."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def finalize(self, status: str) -> None:
        (self.folder / "finalizing").touch()
        time.sleep(60)


def main(asked: dict[str, Any]) -> None:
    from lightning_pp import PipelineParallelStrategy

    folder = Path(asked["folder"])
    devices = asked.get("devices", 2)
    strategy = PipelineParallelStrategy(num_microbatches=2, **asked.get("strategy", {}))
    keeper = [ModelCheckpoint(dirpath=asked["dirpath"], save_top_k=0)] if "dirpath" in asked else []
    options: dict[str, Any] = {"max_epochs": 3, "enable_checkpointing": bool(keeper), **asked.get("trainer", {})}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        default_root_dir=folder,
        logger=SlowLogger(folder) if asked.get("ends_slowly") else False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Losses(folder, asked.get("pause_s", 0.0)), *keeper],
        **options,
    )
    module = Regression(asked.get("event"), tuple(asked.get("ranks", ())), asked.get("at", 0))
    getattr(trainer, asked.get("method", "fit"))(module, loader(), ckpt_path=asked.get("ckpt_path"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
