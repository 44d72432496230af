"""Trainings whose hooks, callbacks and steps do what published code does; each returns what is compared."""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import lightning.pytorch as L
import torch
from feature_parts import Data, make, plain
from feature_parts import make_unchecked_trainer as make_trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, ThroughputMonitor
from lightning.pytorch.loggers.logger import DummyLogger
from parity_run import Layout
from small_models import Classifier, Losses
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

Scenario = Callable[[Layout | None], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


class Kept(DummyLogger):
    """Keeps what it is given, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:  # type: ignore[override]
        self.calls.append([step, plain(dict(metrics))])


def fitted(layout: Layout | None, module: Any, callbacks: Any = (), **options: Any) -> tuple[L.Trainer, list[float]]:
    notes = Losses()
    trainer = make_trainer(layout, callbacks=[notes, *callbacks], **options)
    trainer.fit(module, Data())
    return trainer, notes.losses


# ---------------------------------------------------------------- gradients


KEPT = {"clip": functools.partial(clip_grad_norm_, max_norm=0.02)}


class ClipsItself(Classifier):
    """In a hook, with torch's function: as imported, by its path, and kept in an object before there is a strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(clip_grad_norm_(self.parameters(), 0.3)))
        few = torch.nn.utils.clip_grad_norm_(self.layers[:4].parameters(), 0.1, norm_type=float("inf"))
        self.norms.append(float(few))
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.layers[6].weight, 0.05, 1.0)))
        foreign = torch.nn.Parameter(torch.ones(3))
        foreign.grad = torch.full((3,), 2.0)
        self.norms.append(float(clip_grad_norm_([foreign], 1.0)))
        self.norms.append(float(KEPT["clip"](self.parameters())))


@scenario
def clipping_in_a_hook(layout: Layout | None) -> Any:
    module = make(ClipsItself)
    fitted(layout, module)
    return module.norms


class KeepsAverage(Classifier):
    """With torch's own class for it."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.layers)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.layers)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("of_average", cross_entropy(self.average(batch[0]), batch[1]))


@scenario
def average_of_weights(layout: Layout | None) -> Any:
    trainer, losses = fitted(layout, make(KeepsAverage))
    return losses, plain(dict(trainer.callback_metrics))


# ---------------------------------------------------------------- what steps do to the trainer


class StopsByLoss(Classifier):
    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = cross_entropy(self(batch[0]), batch[1])
        if loss.item() == 0 or loss.item() > self.bound:
            self.trainer.should_stop = True
        return loss


@scenario
def training_stopped_by_a_step(layout: Layout | None) -> Any:
    found = {}
    for bound in (1e3, 1.0):  # never, at the first batch, of which every microbatch has a greater loss
        trainer, losses = fitted(layout, make(StopsByLoss, bound=bound))
        found[bound] = [losses, trainer.global_step, trainer.current_epoch]
    return found


class AnnealsBySteps(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        done = self.global_step / self.trainer.estimated_stepping_batches
        return cross_entropy(self(batch[0]), batch[1]) * (1 - done)


@scenario
def steps_that_ask_how_many_there_are(layout: Layout | None) -> Any:
    return fitted(layout, make(AnnealsBySteps))[1]


# ---------------------------------------------------------------- logs and summaries

_HOOKS = [
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    "on_validation_epoch_end",
]


class LogsInHooks(Classifier):
    """In every hook that may."""

    def __init__(self) -> None:
        super().__init__()
        self.num_logged = 0


def _logging(hook: str) -> Callable[..., None]:
    def log(self: Any, *args: Any) -> None:
        self.num_logged += 1
        self.log(hook, float(self.num_logged), prog_bar=hook.endswith("batch_end"))

    return log


for _hook in _HOOKS:
    setattr(LogsInHooks, _hook, _logging(_hook))


class LogsInCallbacks(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.log("of_callback", float(trainer.global_step), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.log_dict({"a": 1.0, "b": float(trainer.current_epoch)}, prog_bar=True)


@scenario
def logs_in_hooks(layout: Layout | None) -> Any:
    logger = Kept()
    trainer, _ = fitted(layout, make(LogsInHooks), [LogsInCallbacks()], logger=logger, log_every_n_steps=1)
    return [logger.calls, plain(dict(trainer.callback_metrics)), plain(dict(trainer.progress_bar_metrics))]


def summaries(layout: Layout | None) -> Any:
    """What rank 0 prints, with as many parameters as the model has."""
    found, log = io.StringIO(), logging.getLogger("lightning.pytorch.callbacks.model_summary")
    handler, level = logging.StreamHandler(found), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    module = make().double()
    module.example_input_array = torch.zeros(2, 6, dtype=torch.float64)
    with redirect_stdout(found):
        trainer, _ = fitted(layout, module, [ModelSummary(max_depth=2)], enable_model_summary=True)
        fitted(layout, make(), [RichModelSummary()], enable_model_summary=True)
    log.removeHandler(handler)
    log.setLevel(level)
    return found.getvalue() if trainer.is_global_zero else "only on rank 0"


def throughput(layout: Layout | None) -> Any:
    """The names of what is logged on rank 0: with one replica no number is one of several devices."""
    logger = Kept()
    fitted(
        layout,
        make(),
        [ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)],
        logger=logger,
        log_every_n_steps=1,
    )
    return sorted({name for _, metrics in logger.calls for name in metrics})
