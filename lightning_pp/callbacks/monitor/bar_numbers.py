"""The pipeline's numbers in Lightning's progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor

from lightning_pp.callbacks._lightning_private import name_epochs_without_end


class BarNumbers:
    """Adds the loss, tokens or samples per second and the bubble to the trainer's progress bar, of any class.

    They change at the logging interval only, so that nothing waits for the device in between. A loss that the module
    shows itself (``self.log(..., prog_bar=True)`` under a name with "loss") is not shown twice.

    Args:
        trainer: Its bar shows the numbers until :meth:`end`; nothing is done where it has none.
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
        """Leaves the bar as it was."""
        if isinstance(self._bar, ProgressBar):
            vars(self._bar).pop("get_metrics", None)
            name_epochs_without_end(self._bar, ends=True)
            self._bar = None

    def _metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        of_bar: dict[str, Any] = self._of_bar(trainer, pl_module)
        has_loss = any("loss" in name for name in of_bar)
        return {**{name: text for name, text in self._shown.items() if name != "loss" or not has_loss}, **of_bar}
