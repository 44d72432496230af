"""The time that a training waits for its loader."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

_FETCH = "train_dataloader_next"


class LoaderWait:
    """Measures how long a fit waits for its training loader, by Lightning's calls of its profiler.

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
