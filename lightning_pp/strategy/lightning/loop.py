"""Lightning's automatic optimization for a step whose backward is part of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch.optim import Optimizer

from lightning_pp.strategy._lightning_private import AutomaticOptimization, call_hooks, call_strategy


class PipelineClosure(Closure):
    """Zeroes the gradients first, since the step computes them; Lightning usually zeroes between step and backward."""

    def __init__(
        self, trainer: pl.Trainer, step: Callable[[], ClosureResult], zero_grad: Callable[[], None] | None
    ) -> None:
        super().__init__(step, zero_grad_fn=zero_grad)
        self._trainer = trainer
        self._step = step
        self._zero_grad = zero_grad

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Runs ``zero_grad`` and the whole pipelined step, then the hooks that belong to backward."""
        if self._zero_grad is not None:
            self._zero_grad()
        result = self._step()
        if result.closure_loss is not None:
            call_hooks(self._trainer, "on_before_backward", result.closure_loss)
            call_hooks(self._trainer, "on_after_backward")
        return result


class PipelineOptimization(AutomaticOptimization):
    """One optimization step: zero the gradients, run the pipeline forward and backward, clip, update.

    Everything else (progress, accumulation, hooks, learning rates) is Lightning's own.

    A rank that is done with its part goes on to the next step; consecutive steps overlap. The collectives of a step:

    ==================================  ======================================  ==================================
    what                                among                                   when
    ==================================  ======================================  ==================================
    reduction of gradients, per unit    replicas of a stage                     last batch of an accumulation
    sum of shared parameters' gradients stages that hold them                   the same, if there are any
    one number, for clipping by norm    all ranks                               the same, with clipping by norm; with
                                                                                ``post_validation`` nobody waits for it
    one number, whether to update       all ranks                               the same, with ``on_nonfinite="skip"``
                                                                                and without clipping by norm
    gather of sample counts             last stages of the replicas             every batch, with replicas
    one number, of microbatches         replicas of a stage                     every batch whose program gathers shards
    gather of logged values             last stages of the replicas, aside      every batch, with replicas
    ==================================  ======================================  ==================================

    So with one replica a step without clipping has none. The last stage sends the results of a batch (logs, loss,
    outputs, attributes, the fingerprint of the batch) to each other rank, point to point and aside from the step, as
    soon as its last forward has ended. Every rank receives them at the end of its own step: a rank's last backward
    comes later than that forward, so they are there by then, but for the time that a message takes.

    The first two batches of an epoch are compared along the pipeline before they are cut, by one gather each.
    """

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        return PipelineClosure(self.trainer, self._make_step_fn(kwargs), self._make_zero_grad_fn(batch_idx, optimizer))

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        """Lightning's refuses None with several processes, for some of them may train; here all of a pipeline skip."""
        output = call_strategy(self.trainer, "training_step", *kwargs.values())
        return self.output_result_cls.from_training_step_output(output, self.trainer.accumulate_grad_batches)

    @classmethod
    def install(cls, trainer: pl.Trainer) -> None:
        """Replaces Lightning's loop by this one, with the progress made so far."""
        epoch_loop = trainer.fit_loop.epoch_loop
        if not isinstance(epoch_loop.automatic_optimization, cls):
            loop = cls(trainer)
            loop.optim_progress = epoch_loop.automatic_optimization.optim_progress
            epoch_loop.automatic_optimization = loop
