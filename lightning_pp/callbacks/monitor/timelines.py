"""The timelines of a fit: which steps, and where they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pp.callbacks.run_folder import folder_of_logs
from lightning_pp.telemetry import (
    MeasurablePipeline,
    RecordedStep,
    StepRecorder,
    chrome_trace,
    html_timeline,
    text_timeline,
)

_FOLDER = "timelines"
_TAG = "pp/timeline"


class FitTimelines:
    """Records steps on every rank, and writes them on global rank 0: to files, to W&B and to TensorBoard.

    Every rank of the first replica's pipeline has to call :meth:`batch_ended` after each batch, and :meth:`collect` at
    the same times; the others may.

    Args:
        trainer: The trainer.
        pipeline: What runs on this rank.
        every_n_steps: How often, in optimizer steps; None: only at the end.
        dirpath: Folder of the files; None: ``timelines`` in the folder of the first logger that has one.
    """

    def __init__(
        self, trainer: pl.Trainer, pipeline: MeasurablePipeline, every_n_steps: int | None, dirpath: str | Path | None
    ) -> None:
        self._trainer = trainer
        self._pipeline = pipeline
        self._every_n_steps = every_n_steps
        self._dirpath = dirpath
        self._is_recorded = pipeline.replica == 0
        self._recorder = StepRecorder(
            pipeline.rank, pipeline.groups.pipeline, has_replicas=pipeline.groups.num_replicas > 1
        )
        self._last = pipeline.last_training_step
        if self._is_recorded:
            pipeline.is_timed = True

    def batch_ended(self, step: int, *, is_update: bool) -> None:
        """After a training batch; collects and writes if it is time.

        Args:
            step: The optimizer step, counted as Lightning logs it.
            is_update: Whether the batch was the last of its step.
        """
        run = self._pipeline.last_training_step
        if run is None or run is self._last or not self._is_recorded:
            return
        self._last = run
        self._recorder.note(step, *run)
        if self._every_n_steps is not None and is_update and (step + 1) % self._every_n_steps == 0:
            self._write(self._recorder.collect(f"every {self._every_n_steps} steps"), step)

    def finish(self, step: int) -> None:
        """At the end of the fit: the last step and the slowest since the last that were written."""
        if self._is_recorded:
            found = self._recorder.collect("the last step")
            self._write(found, step, all_steps=self._recorder.steps)

    def _write(self, found: Sequence[RecordedStep], step: int, all_steps: Sequence[RecordedStep] = ()) -> None:
        if not (found or all_steps) or not self._trainer.is_global_zero:
            return
        steps = self._recorder.steps
        folder = self._folder()
        if folder is not None:
            texts: dict[str, Callable[[Sequence[RecordedStep]], str]] = {"timeline.html": html_timeline}
            if all_steps:  # many times as large, and slow to make
                texts["timeline.json"] = chrome_trace
            self._attempt(f"the files in {folder}", partial(_write_files, folder, steps, texts))
        for logger in self._trainer.loggers:
            self._attempt(type(logger).__name__, partial(_log, logger, all_steps or found, found, step))

    def _folder(self) -> Path | None:
        if self._dirpath is not None:
            return Path(self._dirpath)
        folder = folder_of_logs(self._trainer)
        return None if folder is None else folder / _FOLDER

    def _attempt(self, where: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            rank_zero_warn(
                f"A timeline could not be written to {where}: {type(error).__name__}: {error}. Training goes on."
            )


def _write_files(
    folder: Path, steps: Sequence[RecordedStep], texts: Mapping[str, Callable[[Sequence[RecordedStep]], str]]
) -> None:
    """Each file is whole at any time, since someone may look at it during the run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text_of in texts.items():
        unfinished = folder / f".{name}.unfinished"
        unfinished.write_text(text_of(steps), encoding="utf-8")
        os.replace(unfinished, folder / name)


def _log(logger: Logger, steps: Sequence[RecordedStep], found: Sequence[RecordedStep], step: int) -> None:
    """A page of ``steps`` to W&B, the latest that was found as text to TensorBoard; others show neither."""
    if isinstance(logger, WandbLogger):
        import wandb

        logger.log_metrics({_TAG: wandb.Html(html_timeline(steps))}, step=step)
    elif isinstance(logger, TensorBoardLogger) and found:
        latest = found[-1]
        text = text_timeline(latest.measured, width=140, colors=False)
        # an indented block is code in Markdown
        logger.experiment.add_text(_TAG, "\n".join(f"    {line}" for line in text.splitlines()), latest.step)
