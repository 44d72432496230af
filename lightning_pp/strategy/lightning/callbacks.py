"""Callbacks of Lightning that look at the whole model, or count devices as if each had a batch of its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, ThroughputMonitor

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.strategy._lightning_private import throughputs_of


def adapt_callbacks(trainer: pl.Trainer, fake_parameters: FakeParameters, sizes: ParallelSizes) -> None:
    """Has the callbacks of ``trainer`` speak of the model and not of a stage, and of replicas and not of ranks.

    Args:
        trainer: After the ``setup`` of its callbacks.
        fake_parameters: Knows all parameters of the model.
        sizes: Of the mesh.
    """
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if isinstance(callback, ModelSummary):
            _summarize_whole_model(callback, fake_parameters)
        elif isinstance(callback, ThroughputMonitor):
            _count_replicas(callback, sizes)


def _summarize_whole_model(callback: ModelSummary, fake_parameters: FakeParameters) -> None:
    def on_fit_start(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        with fake_parameters.all_parameters():  # a summary counts while it is printed
            type(callback).on_fit_start(callback, trainer, module)

    vars(callback)["on_fit_start"] = on_fit_start


def _count_replicas(callback: ThroughputMonitor, sizes: ParallelSizes) -> None:
    """A batch is a replica's, whose devices share the operations of it."""
    for throughput in throughputs_of(callback):
        throughput.world_size = sizes.data_parallel
        if throughput.available_flops is not None and callback.available_flops is not None:
            throughput.available_flops = callback.available_flops * sizes.pipeline
