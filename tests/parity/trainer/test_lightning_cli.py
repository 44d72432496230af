"""Trainings that LightningCLI configures: the same file for one device and for a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Losses
from torch import Tensor, nn

PIPELINE = """
class_path: lightning_pp.PipelineParallelStrategy
init_args: {pipeline_parallel_size: 2, num_microbatches: 2, schedule: zb_h1, split_points: [blocks.1]}
"""


class Module(pl.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.blocks(x).mean(-1) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


def fitted(folder: Path, strategy: str, devices: int, *more: str) -> tuple[list[float], str]:
    """In a worker: the losses of a training, and the newest checkpoint."""
    losses = Losses()
    arguments = [
        "fit", "--seed_everything=3", "--trainer.accelerator=cpu", f"--trainer.devices={devices}",
        "--trainer.precision=64-true", f"--trainer.strategy={strategy}", "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={folder}", "--model.lr=0.01", *more,
    ]  # fmt: skip
    cli = LightningCLI(Module, Data, args=arguments, trainer_defaults={"callbacks": [losses]})
    return losses.losses, str(cli.trainer.checkpoint_callback.best_model_path)


def test_trains_resumes_and_writes_down_its_configuration(pool: WorkerPool, tmp_path: Path) -> None:
    expected, _ = pool.run(fitted, tmp_path / "one", "auto", 1, "--trainer.max_epochs=3", world_size=1, timeout=60)[0]
    args = tmp_path / "two", PIPELINE, 2
    (first, checkpoint), other = pool.run(fitted, *args, "--trainer.max_epochs=2", world_size=2, timeout=90)
    assert first == other[0] == pytest.approx(expected[: len(first)], rel=1e-9)
    (written,) = (tmp_path / "two").rglob("config.yaml")
    options = yaml.safe_load(written.read_text())["trainer"]["strategy"]["init_args"]
    assert options["num_microbatches"] == 2 and options["split_points"] == ["blocks.1"]
    resume = f"--config={written}", "--trainer.max_epochs=3", f"--ckpt_path={checkpoint}"
    for rest, _ in pool.run(fitted, *args, *resume, world_size=2, timeout=90):
        assert rest == pytest.approx(expected[len(first) :], rel=1e-9)
