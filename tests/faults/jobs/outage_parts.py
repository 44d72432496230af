"""Runs whose loggers fail while they are under way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from pipelined_fit import loader
from small_models import Blocks

from lightning_pp import PipelineMonitor, PipelineParallelStrategy
from lightning_pp.distributed.watch.processes import is_gone

NUM_BATCHES, BROKEN_AFTER = 6, 2


class Logged(Blocks):
    """Logs its loss, keeps it, and logs hyper-parameters in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.save_hyperparameters({"width": 8})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        for logger in self.trainer.loggers:
            logger.log_hyperparams({"seen": batch_idx})


class Failing(DummyLogger):
    """A user's logger, on every rank, that raises in all it is asked once ``broken``."""

    def __init__(self, broken: bool = False, of_rank: int | None = None) -> None:
        super().__init__()
        self.broken = broken
        self.of_rank = of_rank
        self.asked: set[str] = set()

    def _fail(self, name: str) -> None:
        self.asked.add(name)
        if self.broken and self.of_rank in (None, int(os.environ.get("RANK", "0"))):
            raise ConnectionError("the server is gone")

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self._fail("log_metrics")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self._fail("log_hyperparams")

    def save(self) -> None:
        self._fail("save")

    def finalize(self, status: str) -> None:
        self._fail("finalize")

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._fail("after_save_checkpoint")


class Breaks(L.Callback):
    """After some batches, breaks what the loggers of this rank write to."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 != BROKEN_AFTER:
            return
        for logger in trainer.loggers:
            if isinstance(logger, Failing):
                logger.broken = True
            elif isinstance(logger, CSVLogger) and trainer.is_global_zero:
                for name in ("metrics.csv", "hparams.yaml"):
                    file = Path(logger.log_dir) / name
                    file.unlink(missing_ok=True)
                    file.symlink_to("/dev/full")
            elif isinstance(logger, WandbLogger) and trainer.is_global_zero:
                kill_wandb()


def forget_wandb() -> None:
    """Lets the next run start a service of its own, also where an earlier one has told processes of its service."""
    wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)


def kill_wandb() -> None:
    """Kill the service process of W&B that this process has started; its sockets are closed when this returns."""
    # -ww: whole lines, whatever COLUMNS says
    listed = subprocess.run(["ps", "-eww", "-o", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    mine = [line.split() for line in listed.splitlines() if "wandb-core" in line]
    found = [int(pid) for pid, parent, *_ in mine if int(parent) == os.getpid()]
    assert found, f"{os.getpid()} has no service; {os.environ.get('WANDB_SERVICE')}\n{mine}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not all(map(is_gone, found)):
        assert time.monotonic() < deadline, f"processes {found} are there 30 s after SIGKILL"
        time.sleep(0.01)


def fit_with(kind: str, folder: str, pipeline: int, broken: bool = False, of_rank: int | None = None) -> dict[str, Any]:
    """One fit; its losses, what was warned of, and what the logger was asked.

    Args:
        kind: ``failing``, ``csv``, ``wandb`` or ``none``.
        folder: Where files are written.
        pipeline: Stages; 1 for a plain Trainer on one device.
        broken: Whether the failing logger fails from the start.
        of_rank: The rank on which it fails; None for all.
    """
    if kind == "wandb":
        forget_wandb()
    logger: Any = {
        "failing": lambda: Failing(broken, of_rank),
        "csv": lambda: CSVLogger(folder, name="csv", version=0, flush_logs_every_n_steps=1),
        "wandb": lambda: WandbLogger(project="outage", save_dir=folder, offline=True),
        "none": lambda: False,
    }[kind]()
    module = Logged()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=pipeline,
        strategy=PipelineParallelStrategy(pipeline, num_microbatches=2, check_first_batches=False)
        if pipeline > 1
        else "auto",
        max_epochs=1,
        logger=logger,
        callbacks=[
            Breaks(),
            ModelCheckpoint(folder + "/checkpoints", every_n_train_steps=4),
            *([PipelineMonitor(every_n_steps=1)] if pipeline > 1 else []),
        ],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(4 * NUM_BATCHES))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {
        "losses": module.losses,
        "told": [text for warning in caught if "rank" in (text := str(warning.message)) and " raised " in text],
        "asked": logger.asked if isinstance(logger, Failing) else set(),
        "error": error,
        "left_as_it_was": not logger or "log_metrics" not in vars(logger),
    }
