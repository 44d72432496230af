"""Callbacks of Lightning that look at the whole model, or count devices as if each had a batch of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, ThroughputMonitor

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.strategy._lightning_private import replace_summary, summary_columns, throughputs_of


def callbacks_of(trainer: pl.Trainer) -> list[Any]:
    """The callbacks of ``trainer``; none while it is made."""
    return list(getattr(trainer, "callbacks", []))


def adapt_callbacks(trainer: pl.Trainer, split: Callable[[], SplitModel], sizes: ParallelSizes) -> None:
    """Has the callbacks of ``trainer`` speak of the user's model and not of a stage, and of replicas and not of ranks.

    Args:
        trainer: After the ``setup`` of its callbacks.
        split: Gives the model as it is cut by the time of the summary.
        sizes: Of the mesh.
    """

    def of_all(original: Callable[..., Any]) -> Callable[..., WholeSummary]:
        def summary(*args: Any) -> WholeSummary:
            fakes = split().fake_parameters
            # of parameters that are cut, fakes have the whole shape
            with fakes.all_parameters() if split().tensor is None else fakes.all_fake(lambda fake, name: None):
                return WholeSummary(original(*args), split())

        return summary

    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelSummary):
            replace_summary(callback, of_all)
        if isinstance(callback, ThroughputMonitor):
            for throughput in throughputs_of(
                callback
            ).values():  # a batch is a replica's, whose devices share its operations
                throughput.world_size = sizes.data_parallel
                if throughput.available_flops is not None and callback.available_flops is not None:
                    throughput.available_flops = callback.available_flops * sizes.ranks_of_batch


class WholeSummary:
    """The numbers of Lightning's summary, counted while all parameters were there; later a rank may have a part."""

    def __init__(self, summary: Any, split: SplitModel) -> None:
        self.total_parameters: int = summary.total_parameters
        self.trainable_parameters: int = summary.trainable_parameters
        self.model_size: float = summary.model_size
        self.total_training_modes: dict[str, int] = summary.total_training_modes
        self.total_flops: int = summary.total_flops
        columns = dict(summary_columns(summary))
        layers = zip(columns["Name"], columns["Type"], strict=True)
        columns["Type"] = [kind + stages_text(split, name) for name, kind in layers]
        self._columns = list(columns.items())

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self._columns


def stages_text(split: SplitModel, name: str) -> str:
    """The stages that hold parameters of the layer, or units in it: `` (stage 0-2)``; empty for a layer without any."""
    names = split.fake_parameters.canonical_names
    found = {stage for each in names if each.startswith(f"{name}.") for stage in split.owners[names[each]]}
    for unit, stage in split.partition.stage_of_unit.items():
        if f"{unit}.".startswith(f"{name}.") or f"{name}.".startswith(f"{unit}."):
            found.add(stage)
    return f" (stage {_ranges(sorted(found))})" if found else ""


def _ranges(numbers: Sequence[int]) -> str:
    # consecutive numbers have the same distance from their place
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
