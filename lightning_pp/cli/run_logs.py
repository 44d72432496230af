"""Loggers of a resumed run (the same W&B run, the same version of files), or of one of several runs in a process."""

from __future__ import annotations

import csv
import re
import warnings
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, open_dict

_WANDB_LOGGERS = ("WandbLogger", "PipelineWandbLogger")
_WANDB_FOLDER = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")


def go_on_with_logs(logger: DictConfig) -> None:
    """Has a logger's configuration name what the run has logged to before, if there is such and nothing else is named.

    The W&B run is known by the folder that wandb has left in ``save_dir``; others by their newest version.
    """
    kind = str(logger.get("_target_", "")).rpartition(".")[2]
    if logger.get("version") is not None or logger.get("id") is not None or logger.get("save_dir") is None:
        return
    version: Any = None
    if kind in _WANDB_LOGGERS:
        version = _wandb_run(Path(logger.save_dir))
    elif kind in ("CSVLogger", "TensorBoardLogger"):
        version = _newest_version(Path(logger.save_dir, logger.get("name", "lightning_logs") or ""))
    if version is not None:
        with open_dict(logger):
            logger.version = version


def name_the_sweep(logger: DictConfig | None, hydra: Any) -> None:
    """Has the W&B runs of a sweep share a group, named by the sweep's folder, unless another one is named."""
    if logger is None or hydra.mode != RunMode.MULTIRUN or logger.get("group") is not None:
        return
    if str(logger.get("_target_", "")).rpartition(".")[2] in _WANDB_LOGGERS:
        with open_dict(logger):
            logger.group = str(hydra.sweep.dir)


def end_wandb_run(*, failed: bool) -> None:
    """Ends the W&B run that is open in this process, if there is one; else the next logger would write into it."""
    import wandb

    if wandb.run is None:
        return
    try:
        wandb.finish(exit_code=int(failed))
    except Exception as error:
        warnings.warn(f"The W&B run could not be finished: {type(error).__name__}: {error}", stacklevel=2)


def keep_rows(logger: CSVLogger, step: int) -> None:
    """Has a :class:`CSVLogger`, which empties its file, write again what the run logged before ``step``; on rank 0."""
    file = Path(logger.log_dir, "metrics.csv")
    if not file.is_file():
        return
    with file.open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if int(float(row["step"])) < step]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
        writer = logger.experiment
    for row in rows:
        values: dict[str, Any] = {name: value for name, value in row.items() if value != "" and name != "step"}
        writer.log_metrics(values, step=int(float(row["step"])))
    writer.save()


def _wandb_run(save_dir: Path) -> str | None:
    """The id of the newest run in wandb's folder; ``wandb`` is where wandb writes, or else ``.wandb``."""
    names = [path.name for folder in ("wandb", ".wandb") for path in Path(save_dir, folder).glob("*run-*")]
    runs = [match.groups() for name in names if (match := _WANDB_FOLDER.fullmatch(name))]
    return max(runs)[1] if runs else None


def _newest_version(folder: Path) -> int | None:
    names = [path.name.removeprefix("version_") for path in folder.glob("version_*")]
    return max((int(name) for name in names if name.isdecimal()), default=None)
