"""Refusals before a pipeline starts: they name the cause, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.split.record.step_record import Failure, StepRecord
from lightning_pp.strategy._lightning_private import synchronizes_layers, trainer_of
from lightning_pp.strategy.lightning.callbacks import callbacks_of
from lightning_pp.strategy.parameters.precision import refuse_precision
from lightning_pp.strategy.step.progress import unwatched

# of parameter groups
_SET_BY_STEPS = ("lr", "weight_decay")
_REFUSED_CALLBACKS: dict[type[Callback], str] = {
    StochasticWeightAveraging: (
        "copies the whole module before it is split and keeps the copy in its own state, but a checkpoint has that "
        "state from the first rank only. Use WeightAveraging (equal weights, as SWA) or EMAWeightAveraging, with a "
        "learning rate schedule of your own."
    ),
    ModelPruning: (
        "compares the weights of all layers and replaces parameters while training runs, but a stage has only its own. "
        "Prune the module on one device, before or after training."
    ),
}


def refuse_unsupported(
    trainer: pl.Trainer, module: pl.LightningModule, precision: Precision, device: torch.device
) -> None:
    """Raises :class:`ConfigurationError` for steps, optimization, layers and precision that a pipeline cannot run."""
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        function = getattr(module, step)
        if function is not None and is_param_in_hook_signature(function, "dataloader_iter", explicit=True):
            raise ConfigurationError(
                f"{step} of {type(module).__name__} takes dataloader_iter, but a pipeline must see the batch to cut it "
                "into microbatches. Take (batch, batch_idx) instead."
            )
    if trainer.state.fn == TrainerFn.FITTING:
        _refuse_own_backward(module)
    synchronized = [name for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)]
    if synchronized or synchronizes_layers(trainer):
        what = f"{synchronized[0]} is a SyncBatchNorm" if synchronized else "sync_batchnorm=True"
        raise ConfigurationError(
            f"{what}: it takes its statistics over all ranks, but the ranks of other stages never take part. Use "
            "BatchNorm, which normalises each microbatch by itself, or a norm without statistics over samples "
            "(GroupNorm, LayerNorm)."
        )
    for callback in callbacks_of(trainer):
        for kind, reason in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise ConfigurationError(f"{type(callback).__name__} cannot be used in a pipeline: it {reason}")
    refuse_precision(precision, device)
    if trainer.state.fn == TrainerFn.FITTING:
        _warn_exception_checkpoints(callbacks_of(trainer))


def _warn_exception_checkpoints(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        asks = isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        if asks or isinstance(callback, OnExceptionCheckpoint):
            how = "save_on_exception=True" if asks else "its only task"
            rank_zero_warn(
                f"{type(callback).__name__} will write nothing when an exception ends the run ({how}). In a pipeline "
                "the stages may then be one step apart, and some may not be there to write their parts. Save between "
                "steps instead, with ModelCheckpoint(every_n_train_steps=...), and resume from the last one."
            )


def _refuse_own_backward(module: pl.LightningModule) -> None:
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} sets automatic_optimization=False. A pipeline interleaves the forward and "
            "backward of many microbatches, so it must run them itself. Remove manual_backward and optimizer.step from "
            "training_step and return the loss."
        )
    # Lightning takes a wrapper of its own method, put on the instance, for that method
    if is_overridden("backward", module) or "backward" in vars(module):
        raise ConfigurationError(
            f"{type(module).__name__} overrides backward, which a pipeline never calls: it runs the backward of many "
            "microbatches, stage by stage. Remove it. Put what it does to the loss into training_step, and what it "
            "does to gradients into on_after_backward."
        )


def refuse_carried_state(module: pl.LightningModule, step: str, record: StepRecord, num_microbatches: int) -> None:
    """Raises :class:`ConfigurationError` for state that goes from batch to batch and cannot be cut with the batch."""
    for carried in record.carried:
        name = ".".join(part for part in ("self", carried.module, carried.attribute) if part)
        if num_microbatches > 1:
            raise ConfigurationError(
                f"{step} of {type(module).__name__} leaves a tensor in {name}, and the next step uses it, at "
                f"{carried.line}. A batch is cut into {num_microbatches} microbatches, and it is not known how they "
                "would share that tensor. Set num_microbatches=1, which carries such state from batch to batch as one "
                "device does, or start each step from a new state."
            )


def refuse_unrecorded(step: str, failure: Failure | None, options: PipelineOptions) -> None:
    """Warns that ``step`` could not be run before training; raises if the cut needs it.

    Args:
        step: The step's name.
        failure: What it raised; None if it could be run.
        options: The strategy's.

    Raises:
        ConfigurationError: The memory of the step has to be known.
    """
    if failure is None:
        return
    needs = {
        "schedule='auto'": options.schedule.source.is_searched,
        "memory_limit_gib": options.schedule.memory_limit_gib is not None,
        "device_memory_gib": options.device_memory_gib is not None,
    }
    for option, is_set in needs.items():
        if is_set:
            raise ConfigurationError(
                f"{step} raised {failure} when it was run before training to find the stages, but {option} needs to "
                "know its memory. If a hook sets what the step needs, set it in __init__ or setup()."
            ) from failure.error
    rank_zero_info(
        f"{step} raised {failure} when it was run before training to find the stages. If a hook sets what the step "
        "needs, that is fine: the step is recorded with its first batch. Units that the run did not reach are cut by "
        "their number of parameters, in the order in which the module defines them. To cut by their costs, set what "
        "the step needs in __init__ or setup()."
    )


def raise_own(failure: Failure | None) -> None:
    """Raises what the user's step raised, if it did: on other ranks it did not, so it is not for want of a hook."""
    if failure is not None:
        raise failure.error


def check_loss(loss: Tensor, module: pl.LightningModule) -> None:
    """Raises :class:`ConfigurationError` unless ``loss`` is one number that depends on trainable parameters.

    Before the first batch all may be frozen that a ``BaseFinetuning`` thaws when an epoch starts.
    """
    if loss.numel() != 1:
        raise ConfigurationError(
            f"training_step of {type(module).__name__} returned a loss of shape {tuple(loss.shape)}, but it must be "
            "one number. Take its mean."
        )
    if not loss.requires_grad and not _thaws_later(module):
        raise ConfigurationError(
            f"The loss that training_step of {type(module).__name__} returned does not depend on any parameter that "
            "requires a gradient. Check for .detach(), .item(), torch.no_grad(), and for parameters that are all "
            "frozen."
        )


def _thaws_later(module: pl.LightningModule) -> bool:
    """Whether no batch has come yet, and a callback may thaw parameters until then."""
    trainer = trainer_of(module)
    if trainer is None or trainer.fit_loop.epoch_loop.batch_progress.current.ready:
        return False
    return any(isinstance(callback, BaseFinetuning) for callback in callbacks_of(trainer))


# by trainer the epoch and batch in which a run of its step has last changed a scheduled value
_last_changed_in: WeakKeyDictionary[pl.Trainer, tuple[int, int]] = WeakKeyDictionary()


@contextmanager
def repeated_changes_refused(module: pl.LightningModule, step: str) -> Iterator[None]:
    """Around each run of a step: it may set learning rates, but no run may change what an earlier one has set.

    Raises:
        ConfigurationError: It changes learning rates, or steps a scheduler, and a run before it has done so as well.
    """
    trainer = unwatched(trainer_of(module))
    before = None if trainer is None or step != "training_step" else _scheduled_values(trainer)
    yield
    if trainer is None or before is None or before == (now := _scheduled_values(trainer)):
        return
    batch = trainer.current_epoch, trainer.fit_loop.batch_idx
    if _last_changed_in.get(trainer) != batch:
        _last_changed_in[trainer] = batch
        return
    what, was, became = next((name, before[name], now[name]) for name in now if before.get(name) != now[name])
    raise ConfigurationError(
        f"training_step changes the {' '.join(map(str, what))} each time that it runs: from {was} to {became} in this "
        "run. A pipeline runs a step several times for a batch. Change it in a hook (on_train_batch_start, "
        "lr_scheduler_step). Or compute the value from self.global_step."
    )


def _scheduled_values(trainer: pl.Trainer) -> dict[tuple[str | int, ...], Any]:
    """Learning rates, weight decays and steps of schedulers, by name."""
    groups = ((i, j, group) for i, each in enumerate(trainer.optimizers) for j, group in enumerate(each.param_groups))
    found: dict[tuple[str | int, ...], Any] = {
        (key, "of group", j, "of optimizer", i): group.get(key) for i, j, group in groups for key in _SET_BY_STEPS
    }
    for i, config in enumerate(trainer.lr_scheduler_configs):
        found["last_epoch of scheduler", i] = getattr(config.scheduler, "last_epoch", None)
    return found
