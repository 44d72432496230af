"""Tells what to change: after the first measured steps of a fit, and at its end."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pp.telemetry.diagnosis.collection import DiagnosablePipeline, StepWindow
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis

_FETCH = "train_dataloader_next"


class LoaderWait:
    """Takes the time that a fit waits for its training loader, which Lightning tells its profiler around.

    Args:
        trainer: Its profiler is listened to until :meth:`end`.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._profiler: Any = trainer.profiler  # type: ignore[attr-defined] # set by a connector
        self._waited_s = 0.0
        self._begun = 0.0
        start, stop = self._profiler.start, self._profiler.stop

        def start_and_note(action_name: str) -> None:
            start(action_name)
            if action_name.endswith(_FETCH):
                self._begun = time.perf_counter()

        def stop_and_note(action_name: str) -> None:
            if action_name.endswith(_FETCH):
                self._waited_s += time.perf_counter() - self._begun
            stop(action_name)

        self._profiler.start, self._profiler.stop = start_and_note, stop_and_note

    def take_ms(self) -> float:
        """Milliseconds since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return 1e3 * waited

    def end(self) -> None:
        """Listens no longer."""
        del self._profiler.start, self._profiler.stop


class FitDiagnosis:
    """The diagnoses of one fit; every rank has one.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        pipeline: DiagnosablePipeline = trainer.strategy.engine  # type: ignore[attr-defined] # of a pipeline's strategy
        self._window = StepWindow(pipeline)
        self._wait = LoaderWait(trainer)
        self._has_told = False

    def batch_ended(self) -> None:
        """Notes a training batch; after the first measured steps gathers, and tells on rank 0, once."""
        self._window.batch_ended(self._wait.take_ms())
        if self._window.is_due:
            diagnosis = self._diagnose()
            if diagnosis is not None and diagnosis.findings and not self._has_told:
                self._has_told = True
                rank_zero_info(diagnosis.text)

    def finish(self) -> Diagnosis | None:
        """The diagnosis of the latest steps, on rank 0 of the first pipeline; every rank has to call it."""
        self.end()
        return self._diagnose()

    def end(self) -> None:
        """Leaves the trainer as it was."""
        self._wait.end()

    def _diagnose(self) -> Diagnosis | None:
        """A diagnosis that fails is told, and is no reason to end a training; it fails on rank 0, after the gather."""
        try:
            return self._window.diagnose(self._num_workers())
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            rank_zero_warn(f"The diagnosis failed with {type(error).__name__}: {error}. Training goes on.")
            return None

    def _num_workers(self) -> int | None:
        number = getattr(self._trainer.train_dataloader, "num_workers", None)
        return number if isinstance(number, int) else None
