"""Undoes what a training batch has changed besides gradients."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch

from lightning_pp.split.side_effects.generators import GeneratorStates
from lightning_pp.split.side_effects.module_state import SavedState
from lightning_pp.strategy.results.metrics import PipelineMetrics


def batch_undo(module: pl.LightningModule, metrics: PipelineMetrics, device: torch.device) -> Callable[[], None]:
    """A function that makes buffers, attributes, metrics and generators as they are now.

    Logs, outputs and what the step changes outside of units are in the batch's report, which is not sent.
    """
    state, restore_metrics = SavedState(list(module.named_modules()), swaps=False), metrics.saved()
    generators, should_stop = GeneratorStates.now(device), module.trainer.should_stop

    def undo() -> None:
        state.restore()
        restore_metrics()
        generators.put_back(device)
        module.trainer.should_stop = should_stop

    return undo
