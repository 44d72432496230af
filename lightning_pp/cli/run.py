"""One run: the objects that a config builds, and the Trainer method that it calls."""

from __future__ import annotations

import logging
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_zero_warn
from omegaconf import DictConfig

from lightning_pp.callbacks import PredictionWriter
from lightning_pp.cli.before_launch import callbacks_that_save, can_be_cut
from lightning_pp.cli.earlier_run import Position, position_of, why_finished
from lightning_pp.cli.launch import is_rank_zero, share_cores
from lightning_pp.cli.past_runs.run_file import write_run_file
from lightning_pp.cli.problems import UserError, full_errors_wanted, user_errors
from lightning_pp.cli.report import RunSummary, print_summary
from lightning_pp.cli.run_logs import end_wandb_run, go_on_with_logs, keep_rows, name_the_sweep
from lightning_pp.conf import Mode
from lightning_pp.conf.secrets import hide, hide_in_files, without_secrets
from lightning_pp.conf.targets import build, check_targets_of_run

#: What ``ckpt_path`` says for the weights that the model is made with.
INITIAL = "initial"


@dataclass
class Run:
    """The objects that one config builds."""

    config: DictConfig
    trainer: L.Trainer
    model: L.LightningModule
    data: L.LightningDataModule

    @classmethod
    def build(cls, config: DictConfig) -> Run:
        """Build data, model and Trainer, the cheapest and most often wrong first.

        Raises:
            InstantiationException: Something the config names cannot be built; its cause says why.
            ConfigurationError: Something the config names is not from an allowed package; nothing has been built.
            UserError: ``ckpt_path`` names nothing, or is not given where one is needed, or the trainer wants a GPU
                where there is none.
        """
        _check_weights_are_named(config.mode, config.ckpt_path)
        _check_checkpoint_path(config.ckpt_path)
        _check_gpu(config.trainer.get("accelerator"))
        _let_hydra_print(resumes=config.get("resume") is not None)
        L.seed_everything(config.seed, workers=True, verbose=False)
        check_targets_of_run(config)
        data = build(config.data)
        strategy = build(config.strategy)
        model = build(config.model)
        callbacks = [build(c) for c in callbacks_that_save(config.callbacks, model, data, config.trainer).values()]
        if config.mode is Mode.predict and not any(isinstance(c, BasePredictionWriter) for c in callbacks):
            callbacks.append(PredictionWriter(Path(HydraConfig.get().runtime.output_dir) / "predictions"))
        if config.get("resume") is not None and config.logger is not None:
            go_on_with_logs(config.logger)
        if HydraConfig.initialized():
            name_the_sweep(config.logger, HydraConfig.get())
        logger = build(config.logger) if config.logger is not None else False
        trainer = build(config.trainer, strategy=strategy, logger=logger, callbacks=callbacks)
        for one in trainer.loggers:
            _hide_secrets_from(one)
        share_cores(trainer.num_devices)
        if config.mode is Mode.fit and not can_be_cut(trainer, model, data, config.trainer):
            model, data = build(config.model), build(config.data)
        return cls(config, trainer, model, data)

    @staticmethod
    def has_ended(config: DictConfig) -> bool:
        """Whether the run to go on with has nothing left to do, which is said then.

        Raises:
            UserError: ``mode`` is not one that goes on.
        """
        if config.resume is None:
            return False
        if config.mode is not Mode.fit:
            raise UserError(
                f"resume= continues a training, but mode={config.mode.value} is not one. Name a checkpoint instead: "
                "ckpt_path=PATH."
            )
        position = _position_of(config)
        why = why_finished(config, position) if position is not None else None
        if why is not None and is_rank_zero():
            sys.stderr.write(f"lightning-pp: the run {config.resume} is finished: {why}\n")
        return why is not None

    def execute(self) -> None:
        """Call the Trainer method that ``mode`` names.

        Raises:
            UserError: The model, the data, the checkpoint and the pipeline do not fit together.
        """
        method = getattr(self.trainer, self.config.mode.value)
        with _hidden_arguments():  # which W&B keeps, when it is first logged to
            for logger in self.trainer.loggers:
                if self.config.get("resume") is not None and isinstance(logger, CSVLogger) and is_rank_zero():
                    position = _position_of(self.config)
                    keep_rows(logger, position.step if position is not None else 0)
                self._log_config(logger)
        with user_errors(FileNotFoundError):
            path = None if self.config.ckpt_path == INITIAL else self.config.ckpt_path
            # predictions are written, and need not be kept
            more = {"return_predictions": False} if self.config.mode is Mode.predict else {}
            method(self.model, datamodule=self.data, ckpt_path=path, **more)

    def _log_config(self, logger: Logger) -> None:
        """The first that ``logger`` is given, by which it shows whether it can be used."""
        try:
            logger.log_hyperparams(without_secrets(self.config))
        except Exception as error:
            if full_errors_wanted():
                raise
            raise UserError(
                f"{type(logger).__name__} cannot be used: {type(error).__name__}: {error}. Run without one: logger=none"
            ) from error

    def report(self) -> None:
        """On rank 0, print what the run did and where its results are; leave a file for ``lightning-pp-report``."""
        if not self.trainer.is_global_zero:
            return
        summary = self._summary()
        print_summary(summary)
        if summary.report is not None:
            config = without_secrets(self.config)
            try:
                write_run_file(summary.output_folder, summary.report, summary.metrics, config)
            except OSError as error:
                rank_zero_warn(f"lightning-pp-report will not find this run. Its file could not be written: {error}")

    def close(self, *, failed: bool = False) -> None:
        """End what the loggers have open; the process may go on to another run."""
        if self.trainer.is_global_zero and any(isinstance(logger, WandbLogger) for logger in self.trainer.loggers):
            end_wandb_run(failed=failed)

    def _summary(self) -> RunSummary:
        trainer: Any = self.trainer  # a connector sets its callbacks
        monitor: Any = next((c for c in trainer.callbacks if getattr(c, "report", None) is not None), None)
        writers = [c for c in trainer.callbacks if isinstance(c, PredictionWriter)]
        checkpoint_callback = self.trainer.checkpoint_callback
        fitted = self.config.mode is Mode.fit
        checkpoint = getattr(checkpoint_callback, "best_model_path", "") if fitted else ""
        return RunSummary(
            report=monitor.report if monitor is not None and fitted else None,
            metrics={name: float(value) for name, value in self.trainer.callback_metrics.items()},
            checkpoint=str(checkpoint) if checkpoint else None,
            tracking={name: path for logger in self.trainer.loggers for name, path in _log_folder(logger)},
            predictions=writers[0].folder if writers and self.config.mode is Mode.predict else None,
            output_folder=Path(HydraConfig.get().runtime.output_dir),
        )


def _position_of(config: DictConfig) -> Position | None:
    """Where the checkpoint stands that a run goes on from; None without one, and where it is not on this machine."""
    path = config.ckpt_path
    return position_of(path) if path is not None and Path(path).exists() else None


def _check_weights_are_named(mode: Mode, path: str | None) -> None:
    """Evaluating weights that nothing has trained is seldom meant, so it has to be said."""
    if mode is not Mode.fit and path is None:
        raise UserError(
            f"mode={mode.value} needs a checkpoint: ckpt_path=PATH. To use the model's initial weights (random unless "
            f"it reads them itself), set ckpt_path={INITIAL}"
        )


def _check_checkpoint_path(path: str | None) -> None:
    """Say that a checkpoint is missing before anything is launched; words and addresses are Lightning's to resolve."""
    if path is None or path in (INITIAL, "best", "last", "hpc") or ":" in path or Path(path).exists():
        return
    raise UserError(f"ckpt_path={path} does not exist (looked from {Path.cwd()})")


def _check_gpu(accelerator: str | None) -> None:
    """Say what to do without a GPU before anything is built; Lightning says only that there is none."""
    if accelerator not in ("gpu", "cuda") or torch.cuda.is_available() or torch.backends.mps.is_available():
        return
    why = "finds none" if torch.version.cuda or torch.version.hip else "is built for CPUs"
    raise UserError(
        f"trainer.accelerator={accelerator} needs a GPU, but torch {torch.__version__} {why} here. Run it on a machine "
        "with a GPU, or on CPU processes: trainer=cpu trainer.devices=NUMBER (lightning-pp-plan plans for GPUs without "
        "one)"
    )


def _let_hydra_print(*, resumes: bool) -> None:
    """Lightning and Hydra both put handlers on Lightning's loggers: keep Hydra's, which also writes the log file."""
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # Lightning 2.6 asks torch a question that torch 2.13 deprecates; no user can do anything about it.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    if resumes:  # its folder has its checkpoints
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    if not is_rank_zero():  # rank 0 says so
        warnings.filterwarnings("ignore", message="The dirpath has changed from")
    rank_zero.log.addFilter(_is_no_tip)


def _is_no_tip(record: logging.LogRecord) -> bool:
    """Lightning praises its own logger and registry in every run; who writes ``logger=wandb`` has chosen."""
    return "Tip: For seamless cloud" not in record.getMessage()


def hide_saved_secrets() -> None:
    """Take the secrets out of the files that Hydra has written for this run, in the folder of rank 0."""
    hydra_config = HydraConfig.get()
    if hydra_config.output_subdir is not None:
        folder = Path(hydra_config.runtime.output_dir) / hydra_config.output_subdir
        hide_in_files(folder, ("config.yaml", "hydra.yaml", "overrides.yaml"))
    if hydra_config.mode == RunMode.MULTIRUN:
        hide_in_files(Path(hydra_config.sweep.dir), ("multirun.yaml",))


@contextmanager
def _hidden_arguments() -> Iterator[None]:
    arguments = sys.argv[1:]
    sys.argv[1:] = hide(arguments)
    try:
        yield
    finally:
        sys.argv[1:] = arguments


def _hide_secrets_from(logger: Logger) -> None:
    """Have ``logger`` log hyper-parameters, also those that modules keep by themselves, without secrets."""
    log_hyperparams: Any = logger.log_hyperparams

    @wraps(log_hyperparams)
    def log_without_secrets(params: Any, *args: Any, **kwargs: Any) -> Any:
        plain = vars(params) if isinstance(params, Namespace) else dict(params)
        return log_hyperparams(hide(plain), *args, **kwargs)

    logger.log_hyperparams = log_without_secrets  # type: ignore[method-assign]


def _log_folder(logger: Logger) -> Iterator[tuple[str, Path]]:
    if isinstance(logger, WandbLogger):
        yield "W&B run", Path(logger.experiment.dir).parent  # beside the folder `files` lies what `wandb sync` reads
    elif logger.log_dir:
        yield type(logger).__name__, Path(logger.log_dir)
