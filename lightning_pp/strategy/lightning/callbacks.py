"""Callbacks of Lightning that look at the whole model, or count devices as if each had a batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.strategy._lightning_private import throughputs_of
from lightning_pp.strategy.lightning.summary import summarize_whole_model


def callbacks_of(trainer: pl.Trainer) -> list[Any]:
    """The callbacks of ``trainer``; none while it is made."""
    return list(getattr(trainer, "callbacks", []))


def adapt_callbacks(trainer: pl.Trainer, split: Callable[[], SplitModel], sizes: ParallelSizes) -> None:
    """Has the callbacks of ``trainer`` speak of the model and not of a stage, and of replicas and not of ranks.

    Args:
        trainer: After the ``setup`` of its callbacks.
        split: Gives the model as it is cut by the time of the summary.
        sizes: Of the mesh.
    """
    summarize_whole_model(trainer, split)
    for callback in callbacks_of(trainer):
        if isinstance(callback, ThroughputMonitor):
            for throughput in throughputs_of(callback):  # a batch is a replica's, whose devices share its operations
                throughput.world_size = sizes.data_parallel
                if throughput.available_flops is not None and callback.available_flops is not None:
                    throughput.available_flops = callback.available_flops * sizes.ranks_of_batch
