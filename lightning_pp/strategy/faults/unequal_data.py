"""Ranks that have different numbers of batches, of which one would wait for another for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from lightning_pp.distributed.watchdog import Progress
from lightning_pp.errors import ConfigurationError


def check_num_batches(trainer: pl.Trainer) -> None:
    """Compares how many batches the ranks have of what the trainer is about to run over; every rank has to call it.

    Loaders without a length have infinitely many here; see :func:`training_progress`.

    Raises:
        ConfigurationError: On all ranks: the numbers differ.
    """
    what, mine = _numbers(trainer)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    for rank, numbers in enumerate(told):
        if numbers != told[0]:
            raise ConfigurationError(
                f"Rank 0 has {_written(told[0])} batches of {what} data, and rank {rank} has {_written(numbers)}: the "
                "one with more would wait for the other for ever. Give every rank as many: let nothing in datasets and "
                "samplers depend on the rank but by strategy.data_parallel_rank, and drop or repeat what does not "
                "divide (DistributedSampler does)."
            )


def training_progress(trainer: pl.Trainer) -> Progress | None:
    """How far a fit has come in the data of its epoch; None outside of its training."""
    if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
        return None
    batches = trainer.fit_loop.epoch_loop.batch_progress
    has_ended = batches.is_last_batch and batches.current.completed == batches.current.ready
    return Progress(trainer.current_epoch, batches.current.ready, has_ended)


def _numbers(trainer: pl.Trainer) -> tuple[str, list[float]]:
    """What is run over, and the batches of each of its loaders."""
    stage = trainer.state.stage
    if stage == RunningStage.TRAINING:
        return "training", [trainer.num_training_batches]
    if stage == RunningStage.SANITY_CHECKING:
        return "validation", list(trainer.num_sanity_val_batches)
    if stage == RunningStage.VALIDATING:
        return "validation", list(trainer.num_val_batches)
    if stage == RunningStage.TESTING:
        return "test", list(trainer.num_test_batches)
    return "prediction", list(trainer.num_predict_batches)


def _written(numbers: Sequence[float]) -> str:
    return " + ".join(map(str, numbers)) or "no"
