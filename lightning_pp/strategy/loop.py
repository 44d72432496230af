"""Lightning's automatic optimization for a step whose backward is part of it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call
from torch.optim import Optimizer


class PipelineClosure(Closure):
    """Zeroes the gradients first, since the step makes them: elsewhere Lightning zeroes between step and backward."""

    def __init__(self, trainer: pl.Trainer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._trainer = trainer

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Runs ``zero_grad`` and the whole pipelined step, then the hooks that belong to backward."""
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        result: ClosureResult = self._step_fn()
        trainer = self._trainer
        loss = result.closure_loss
        call._call_callback_hooks(trainer, "on_before_backward", loss)
        call._call_lightning_module_hook(trainer, "on_before_backward", loss)
        call._call_callback_hooks(trainer, "on_after_backward")
        call._call_lightning_module_hook(trainer, "on_after_backward")
        return result


class PipelineOptimization(_AutomaticOptimization):
    """One optimization step: zero the gradients, run the pipeline forward and backward, clip, update.

    Everything else (progress, accumulation, hooks, learning rates) is Lightning's own.
    """

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        return PipelineClosure(
            self.trainer,
            step_fn=self._make_step_fn(kwargs),
            backward_fn=None,
            zero_grad_fn=self._make_zero_grad_fn(batch_idx, optimizer),
        )

    @classmethod
    def install(cls, trainer: pl.Trainer) -> None:
        """Puts this loop in the place of Lightning's, with the progress made so far."""
        epoch_loop = trainer.fit_loop.epoch_loop
        if not isinstance(epoch_loop.automatic_optimization, cls):
            loop = cls(trainer)
            loop.optim_progress = epoch_loop.automatic_optimization.optim_progress
            epoch_loop.automatic_optimization = loop
