"""Folders for the files of callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_pp.errors import ConfigurationError


def log_folder(trainer: pl.Trainer) -> Path | None:
    """The folder of the first logger that has one, as ``ModelCheckpoint`` finds it; on global rank 0 only."""
    for logger in trainer.loggers:
        if logger.save_dir is not None:
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            return Path(logger.save_dir) / str(logger.name) / version
    return None


def shared_folder(trainer: pl.Trainer, dirpath: str | Path | None, name: str) -> Path:
    """Rank 0's folder, for files of every rank; every rank must call this.

    Args:
        trainer: The trainer.
        dirpath: The user's folder, if any.
        name: Otherwise, name of a folder in that of the logs, or in ``default_root_dir``.
    """
    folder = dirpath
    if folder is None and trainer.is_global_zero:
        folder = (log_folder(trainer) or Path(trainer.default_root_dir)) / name
    return Path(trainer.strategy.broadcast(str(folder)))


def check_ranks(callback: str, ranks: object) -> None:
    """Checks the argument ``ranks``.

    Raises:
        ConfigurationError: It is neither ``"all"`` nor a list of numbers.
    """
    if ranks == "all":
        return
    if not isinstance(ranks, (list, tuple)) or not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise ConfigurationError(
            f"{callback}(ranks={ranks!r}) must be 'all', or a list of process numbers, such as [0, 3]."
        )


def is_chosen(callback: str, ranks: str | Sequence[int], rank: int) -> bool:
    """Whether a process is among ``ranks``.

    Raises:
        ConfigurationError: One of them does not exist.
    """
    if isinstance(ranks, str):
        return True
    num_processes = dist.get_world_size() if dist.is_initialized() else 1
    if max(ranks) >= num_processes:
        raise ConfigurationError(
            f"{callback}(ranks={list(ranks)}) names process {max(ranks)}, and the run has {num_processes}, "
            "counted from 0."
        )
    return rank in ranks


def tell_unwritten(what: str, error: Exception) -> None:
    """Warns, on any rank, of a file that could not be written."""
    warnings.warn(f"{what} could not be written: {type(error).__name__}: {error}. Training continues.", stacklevel=2)
