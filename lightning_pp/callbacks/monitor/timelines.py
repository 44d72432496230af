"""Writes the timelines of a fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pp.callbacks.run_folder import log_folder
from lightning_pp.telemetry import RecordedStep, chrome_trace, html_timeline

_FOLDER = "timelines"
_TAG = "pp/timeline"


def write_timeline(
    trainer: pl.Trainer, step: RecordedStep, at_step: int, dirpath: str | Path | None, *, with_trace: bool
) -> None:
    """Writes a step to files and to W&B; on global rank 0. A failed write is a warning, and training continues.

    Args:
        trainer: The trainer.
        step: The step to show.
        at_step: Its optimizer step in W&B.
        dirpath: Folder of the files; None: ``timelines`` in the folder of the first logger that has one.
        with_trace: Whether to write the trace too, which is many times as large and slow.
    """
    logs = log_folder(trainer)
    folder = Path(dirpath) if dirpath is not None else None if logs is None else logs / _FOLDER
    page = cache(partial(html_timeline, step))
    texts: dict[str, Callable[[], str]] = {"timeline.html": page}
    if with_trace:
        texts["timeline.json"] = partial(chrome_trace, step)
    if folder is not None:
        _attempt(f"the files in {folder}", partial(_write_files, folder, texts))
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            _attempt(type(logger).__name__, partial(_log, logger, page, at_step))


def _attempt(where: str, write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as error:
        rank_zero_warn(
            f"A timeline could not be written to {where}: {type(error).__name__}: {error}. Training continues."
        )


def _write_files(folder: Path, texts: dict[str, Callable[[], str]]) -> None:
    """Replaces each file atomically, because it may be read during the run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        unfinished = folder / f".{name}.unfinished"
        unfinished.write_text(text(), encoding="utf-8")
        os.replace(unfinished, folder / name)


def _log(logger: Logger, page: Callable[[], str], step: int) -> None:
    import wandb

    logger.log_metrics({_TAG: wandb.Html(page())}, step=step)
