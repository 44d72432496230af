"""The most memory that a training holds, against what ``device_memory_gib`` counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_pp.doctor.checks.trainings import Chain, batches, loader, trainer_for
from lightning_pp.doctor.findings import Check, Finding, Rank, Status
from lightning_pp.doctor.live_tensors import LiveTensors
from lightning_pp.planning.memory.limit import Need
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.split.memory.estimate import RankMemory
from lightning_pp.strategy.parameters.precision import step_dtypes
from lightning_pp.strategy.strategy import PipelineParallelStrategy

_WIDTH = {"cpu": 128, "cuda": 2048}
_BATCH = {"cpu": 512, "cuda": 8192}
_NUM_BATCHES = 4
_BLOCKS_PER_RANK = 6
"""So many that what one operation takes for a moment, which is not estimated, is a small part."""
_TOO_LOW, _FAR_TOO_HIGH = 1.15, 0.5
_WORKSPACE_BYTES = {"cpu": 0, "cuda": 96 << 20}
"""Of cuBLAS and the like, which the estimate leaves out, as the documentation says."""


class Peaks(pl.Callback):
    """The most that this rank held in its batches after the first two, with its state.

    Attributes:
        peak_bytes: That most.
        outside_bytes: On a device, what is taken of it besides the memory of tensors: its context, communicators.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes = self.outside_bytes = 0
        self._device = device
        self._live: LiveTensors | None = None

    def on_train_batch_start(self, trainer: Any, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self._device.type == "cpu":
            self._live = LiveTensors()  # gradients and states are made from here on
            self._live.__enter__()  # type: ignore[no-untyped-call]
        if batch_idx == 2:
            if self._live is not None:
                self._live.peak_bytes = 0
            else:
                torch.cuda.reset_peak_memory_stats(self._device)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            parameters = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
            self.peak_bytes = self._live.peak_bytes + parameters
            return
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        self.outside_bytes = total - free - torch.cuda.memory_reserved(self._device)


def measure(rank: Rank) -> dict[str, int]:
    """Trains with AdamW under ``1f1b``; the peak and the estimate of this rank, in bytes."""
    width = _WIDTH[rank.device.type]
    module = Chain(_BLOCKS_PER_RANK * rank.num_ranks, width, "adamw")
    peaks = Peaks(rank.device)
    trainer = trainer_for(rank, callbacks=[peaks], schedule="1f1b")
    trainer.fit(module, loader(batches(_NUM_BATCHES, _BATCH[rank.device.type], width)))
    need = Need(*_estimate(trainer))
    return {
        "peak_bytes": peaks.peak_bytes,
        "estimate_bytes": int(need.peak_bytes) + _WORKSPACE_BYTES[rank.device.type],
        "outside_bytes": peaks.outside_bytes,
    }


def _estimate(trainer: pl.Trainer) -> tuple[RankMemory, float]:
    """What the strategy counts for this rank, and of it the activations."""
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineParallelStrategy)
    engine, (optimizer,) = strategy.engine, trainer.optimizers
    assert engine.last_training_step is not None
    schedule, _ = engine.last_training_step
    split = engine.split
    model = MemoryModel.of(
        strategy.options.sharding,
        strategy.sizes.data_parallel_shard,
        step_dtypes(strategy.precision_plugin),
        optimizer=optimizer,
    )
    estimate = model.estimate(split.record, split.partition, split.placement, split.parameter_sizes(), schedule)
    memory = estimate.ranks[engine.rank]
    assert memory.activations_bytes is not None
    return memory, memory.activations_bytes


def judge(values: Sequence[dict[str, int]]) -> list[Finding]:
    """Whether the estimate may be relied on."""
    shares = [value["peak_bytes"] / value["estimate_bytes"] for value in values]
    text = ", ".join(
        f"{value['peak_bytes'] / 2**20:.1f} of {value['estimate_bytes'] / 2**20:.1f}" for value in values[:8]
    )
    found = f"Ranks held {text} MiB that were estimated."
    outside = max(value["outside_bytes"] for value in values) / 2**30
    if outside > 0:
        found += f" CUDA and communicators take {outside:.1f} GiB besides: leave that out of device_memory_gib."
    if max(shares) > _TOO_LOW:
        advice = f"Set device_memory_gib to {1 / max(shares):.2f} of what you meant; attach the JSON to an issue."
        return [Finding(Status.FAILURE, f"The estimate is too low. {found}", advice, list(values))]
    if min(shares) < _FAR_TOO_HIGH:
        advice = "device_memory_gib refuses what would fit; attach the JSON to an issue."
        return [Finding(Status.WARNING, f"The estimate is far too high. {found}", advice, list(values))]
    return [Finding(Status.OK, found, details=list(values))]


CHECKS = [
    Check(
        "memory",
        "the most memory that a training holds is what was estimated",
        measure,
        judge,
        limit_s=60.0,
        advice="Run it again with --only memory, and attach the JSON to an issue.",
    )
]
