"""Writes the state of its process to files: before the package is imported, after, and after each step of set-up."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import hydra  # noqa: F401
import lightning.pytorch as pl
import numpy as np
import torch
import wandb  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def state() -> dict[str, Any]:
    loggers = {
        name: [logger.level, logger.propagate, logger.disabled, len(logger.handlers), len(logger.filters)]
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
    }
    return {
        "torch": digest(torch.get_rng_state().tolist()),
        "python": digest(random.getstate()),
        "numpy": digest([np.asarray(part).tolist() for part in np.random.get_state()]),
        "environment": dict(os.environ),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "warning filters": [str(each) for each in warnings.filters],
        "loggers": loggers,
        "root logger": [logging.root.level, len(logging.root.handlers)],
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "folder": os.getcwd(),
    }


def note(name: str) -> None:
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        Path(f"{name}.json").write_text(json.dumps(state()))


torch.manual_seed(1)
random.seed(1)
np.random.seed(1)
loader = DataLoader(torch.ones(8, 4), 4, shuffle=True)
note("0_before")

import lightning_pp  # noqa: E402

note("1_imported")


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).mean()

    def on_fit_start(self) -> None:
        note("4_set_up")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


with torch.random.fork_rng():
    module = Module()
strategy = lightning_pp.PipelineParallelStrategy(2, num_microbatches=2)
note("2_strategy")
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_steps=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
note("3_trainer")
trainer.fit(module, loader)
