"""One run: what a config builds, and the Trainer method it calls."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from lightning_pp.cli.launch import share_cores
from lightning_pp.cli.problems import UserError, user_errors
from lightning_pp.cli.report import RunSummary, print_summary
from lightning_pp.conf import Mode


@dataclass
class Run:
    """What one config builds."""

    config: DictConfig
    trainer: L.Trainer
    model: L.LightningModule
    data: L.LightningDataModule

    @classmethod
    def build(cls, config: DictConfig) -> Run:
        """Build data, model and Trainer, the cheapest and most often wrong first.

        Raises:
            InstantiationException: Something the config names cannot be built; its cause says why.
            UserError: ``ckpt_path`` names nothing, or the trainer wants a GPU where there is none.
        """
        _check_checkpoint_path(config.ckpt_path)
        _check_gpu(config.trainer.get("accelerator"))
        _let_hydra_print()
        L.seed_everything(config.seed, workers=True, verbose=False)
        data = instantiate(config.data, _convert_="all")
        callbacks = [instantiate(c, _convert_="all") for c in config.callbacks.values() if c is not None]
        strategy = instantiate(config.strategy, _convert_="all")
        model = instantiate(config.model, _convert_="all")
        logger = instantiate(config.logger, _convert_="all") if config.logger is not None else False
        trainer = instantiate(config.trainer, strategy=strategy, logger=logger, callbacks=callbacks, _convert_="all")
        share_cores(trainer.num_devices)
        return cls(config, trainer, model, data)

    def execute(self) -> None:
        """Call the Trainer method that ``mode`` names.

        Raises:
            UserError: The model, the data, the checkpoint and the pipeline do not fit together.
        """
        method = getattr(self.trainer, self.config.mode.value)
        for logger in self.trainer.loggers:
            logger.log_hyperparams({"config": OmegaConf.to_container(self.config, resolve=True)})
        with user_errors(FileNotFoundError):
            method(self.model, datamodule=self.data, ckpt_path=self.config.ckpt_path)

    def report(self) -> None:
        """Print, on rank 0, what the run did and where it left its results."""
        if not self.trainer.is_global_zero:
            return
        print_summary(self._summary())

    def _summary(self) -> RunSummary:
        monitor: Any = next((c for c in _callbacks(self.trainer) if getattr(c, "report", None) is not None), None)
        checkpoint_callback = self.trainer.checkpoint_callback
        fitted = self.config.mode is Mode.fit
        checkpoint = getattr(checkpoint_callback, "best_model_path", "") if fitted else ""
        return RunSummary(
            report=monitor.report if monitor is not None and fitted else None,
            metrics={name: float(value) for name, value in self.trainer.callback_metrics.items()},
            checkpoint=str(checkpoint) if checkpoint else None,
            tracking={_tracker_name(logger): path for logger in self.trainer.loggers if (path := _log_folder(logger))},
            output_folder=Path(HydraConfig.get().runtime.output_dir),
        )


def _check_checkpoint_path(path: str | None) -> None:
    """Say that a checkpoint is missing before anything is launched; words and addresses are Lightning's to resolve."""
    if path is None or path in ("best", "last", "hpc") or ":" in path or Path(path).exists():
        return
    raise UserError(f"ckpt_path={path} does not exist (looked from {Path.cwd()})")


def _check_gpu(accelerator: str | None) -> None:
    """Say what to do without a GPU before anything is built; Lightning says only that there is none."""
    if accelerator not in ("gpu", "cuda") or torch.cuda.is_available() or torch.backends.mps.is_available():
        return
    why = "finds none" if torch.version.cuda or torch.version.hip else "is built for CPUs"
    raise UserError(
        f"trainer.accelerator={accelerator} needs a GPU, and torch {torch.__version__} {why} here. Run it where there "
        "is one, or on processes of the CPU: trainer=cpu trainer.devices=NUMBER (lightning-pp-plan plans for GPUs "
        "without one)"
    )


def _let_hydra_print() -> None:
    """Lightning and Hydra both put handlers on Lightning's loggers: keep Hydra's, which also writes the log file."""
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # Lightning 2.6 asks torch a question that torch 2.13 deprecates; no user can do anything about it.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")


def _callbacks(trainer: L.Trainer) -> list[L.Callback]:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by a connector
    return callbacks


def _tracker_name(logger: Logger) -> str:
    return "W&B run" if isinstance(logger, WandbLogger) else type(logger).__name__


def _log_folder(logger: Logger) -> Path | None:
    if isinstance(logger, WandbLogger):
        return Path(logger.experiment.dir).parent  # beside the folder `files` lies what `wandb sync` reads
    return Path(logger.log_dir) if logger.log_dir else None
