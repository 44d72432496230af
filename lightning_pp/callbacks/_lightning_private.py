"""The private names of Lightning that the callbacks use; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.loggers import WandbLogger

from lightning_pp._private_names import reader_of, uses

# what a logger calls ``wandb.init`` with, once it is used; may be changed until then
init_arguments: Callable[[WandbLogger], dict[str, Any]] = reader_of("lightning.pytorch.loggers.WandbLogger._wandb_init")
# the argument ``checkpoint_name`` of a logger
artifact_name: Callable[[WandbLogger], str | None] = reader_of("lightning.pytorch.loggers.WandbLogger._checkpoint_name")


@uses("lightning.pytorch.loops.fit_loop._FitLoop._should_accumulate")
def accumulates(trainer: pl.Trainer) -> bool:
    """Whether gradients of the training batch under way are kept for a later update."""
    return trainer.fit_loop._should_accumulate()


@uses("lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._batches_that_stepped")
def logged_step(trainer: pl.Trainer) -> int:
    """The step under which Lightning logs training metrics."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


@uses("lightning.pytorch.callbacks.RichProgressBar._get_train_description")
def name_epochs_without_end(bar: ProgressBar, *, ends: bool = False) -> None:
    """Has a rich bar write "Epoch 0" where there is no last epoch, in place of "Epoch 0/-2"; ``ends``: no longer."""
    if not isinstance(bar, RichProgressBar):
        return
    if ends:
        vars(bar).pop("_get_train_description", None)
        return
    describe = bar._get_train_description

    def description(current_epoch: int) -> str:
        if bar.trainer.max_epochs != -1:
            return describe(current_epoch)
        return f"{f'Epoch {current_epoch}':{len(bar.validation_description)}}"

    bar._get_train_description = description  # type: ignore[method-assign]
