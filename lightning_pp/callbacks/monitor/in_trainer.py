"""The monitor's parts in a trainer during a fit: numbers in its progress bar, and the wait for its loader."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor

from lightning_pp.callbacks._lightning_private import name_epochs_without_end

_FETCH = "train_dataloader_next"


class BarNumbers:
    """Adds the loss, tokens or samples per second and the bubble to any progress bar of the trainer.

    They change only at the logging interval, so that nothing waits for the device in between. A loss that the module
    already shows (``self.log(..., prog_bar=True)`` with "loss" in its name) is not repeated.

    Args:
        trainer: Its bar, if any, shows the numbers until :meth:`end`.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._shown: dict[str, str] = {}
        self._bar = trainer.progress_bar_callback
        if isinstance(self._bar, ProgressBar):
            self._of_bar = self._bar.get_metrics
            self._bar.get_metrics = self._metrics  # type: ignore[method-assign]
            name_epochs_without_end(self._bar)

    def show(self, metrics: Mapping[str, float], loss: Tensor | None) -> None:
        """Shows ``metrics`` (:meth:`Measurements.metrics`) and the loss of the latest batch from here on."""
        if not isinstance(self._bar, ProgressBar):
            return
        self._shown = {} if loss is None else {"loss": f"{float(loss):.3f}"}
        through = "tokens" if "pp/tokens_per_s" in metrics else "samples"
        self._shown[f"{through}/s"] = f"{metrics[f'pp/{through}_per_s']:.0f}"
        self._shown["bubble"] = f"{metrics['pp/bubble_fraction']:.1%}"

    def end(self) -> None:
        """Restores the bar."""
        if isinstance(self._bar, ProgressBar):
            vars(self._bar).pop("get_metrics", None)
            name_epochs_without_end(self._bar, ends=True)
            self._bar = None

    def _metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        of_bar: dict[str, Any] = self._of_bar(trainer, pl_module)
        has_loss = any("loss" in name for name in of_bar)
        return {**{name: text for name, text in self._shown.items() if name != "loss" or not has_loss}, **of_bar}


class LoaderWait:
    """Measures a fit's wait for its training loader, by Lightning's calls of its profiler.

    Args:
        trainer: Calls of its profiler are timed until :meth:`end`.
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
        """Restores the profiler."""
        del self._profiler.start, self._profiler.stop
