"""A checkpoint that is asked for before there is a pipeline: saved with one stage, refused with what to do with two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks

from lightning_pp import PipelineParallelStrategy


def save_directly(run: Trainer, path: str) -> None:
    run.save_checkpoint(path)


def save_topk(run: Trainer, path: str) -> None:
    ModelCheckpoint(Path(path).parent)._save_topk_checkpoint(run, {"epoch": torch.tensor(0), "step": torch.tensor(0)})


def save_monitored(run: Trainer, path: str) -> None:
    candidates = {"loss": torch.tensor(1.0), "epoch": torch.tensor(0), "step": torch.tensor(0)}
    ModelCheckpoint(Path(path).parent, monitor="loss")._save_topk_checkpoint(run, candidates)


def save_last(run: Trainer, path: str) -> None:
    ModelCheckpoint(Path(path).parent, save_last=True)._save_last_checkpoint(run, {})


class SavesInSetup(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        trainer.save_checkpoint(self.path)


def save_in_setup(run: Trainer, path: str) -> None:
    run.callbacks.append(SavesInSetup(path))
    run.fit(Blocks(), loader())


def save_too_early(save: Callable[[Trainer, str], None], path: str, stages: int = 2) -> None:
    run = trainer(stages, PipelineParallelStrategy(stages))
    run.strategy.connect(Blocks())
    save(run, path)


@pytest.mark.parametrize("save", [save_directly, save_topk, save_monitored, save_last, save_in_setup])
def test_a_checkpoint_before_a_run_says_why_there_is_none(pool: WorkerPool, save: Any, tmp_path: Any) -> None:
    path = tmp_path / "early" / "early.ckpt"
    for message in pool.refusals("ConfigurationError", save_too_early, save, str(path), world_size=2):
        assert "no checkpoint can be written or read" in message and "on_fit_start" in message
    assert not list(tmp_path.rglob("*.ckpt"))
    save_too_early(save, str(path), stages=1)
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1
