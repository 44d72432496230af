"""A small module, trained under a profiler on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from monitored_fit import loader
from pipelined_fit import trainer
from small_models import TokenModel

from lightning_pp import MemorySnapshots, PipelineParallelStrategy, PipelineProfiler


class Labels(L.Callback):
    """Whether actions were named in each batch."""

    def __init__(self) -> None:
        self.named: list[bool] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.named.append(trainer.strategy.engine.label is not None)  # type: ignore[attr-defined]


class Fails(L.Callback):
    """Raises in a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise OSError("the disk is gone")


def _fit(callbacks: list[L.Callback], **options: Any) -> str | None:
    """Trains on two ranks; what it raised, if it did."""
    strategy = PipelineParallelStrategy(2, 1, num_microbatches=2, schedule="zb_h1", check_first_batches=False)
    run = trainer(2, strategy, callbacks=callbacks, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run.fit(TokenModel(), loader())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def fit_profiled(folder: str) -> list[bool]:
    """Two windows of two batches, of seven."""
    labels = Labels()
    profiler = PipelineProfiler(wait=1, warmup=1, active=2, repeat=0, dirpath=folder)
    assert _fit([profiler, labels]) is None
    return labels.named


def fit_profiled_until_it_fails(folder: str) -> list[str | None]:
    """An error within a window; then a run on rank 1 alone, in which the profiler has to be free again."""
    failed = _fit([PipelineProfiler(wait=0, warmup=1, active=5, dirpath=folder), Fails(3)])
    return [failed, _fit([PipelineProfiler(wait=0, warmup=0, active=1, ranks=[1], dirpath=Path(folder))])]


def fit_refused(folder: str) -> list[str | None]:
    """What cannot be profiled."""
    makers: list[Callable[[], tuple[L.Callback, dict[str, Any]]]] = [
        lambda: (PipelineProfiler(nvtx=True, dirpath=folder), {}),
        lambda: (PipelineProfiler(ranks=[0, 2], dirpath=folder), {}),
        lambda: (PipelineProfiler(dirpath=folder), {"profiler": "pytorch"}),
        lambda: (MemorySnapshots(dirpath=folder), {}),
    ]
    found = []
    for make in makers:
        callback, options = make()
        found.append(_fit([callback], **options))
    return found
