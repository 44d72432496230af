"""Models that are trained for as long as a diagnosis needs, in every process of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch
from model_parts import Architecture
from pipelined_fit import trainer
from torch import nn
from torch.utils.data import DataLoader
from transformers_by_config import CASES, generic

from lightning_pp import PipelineMonitor, PipelineParallelStrategy
from lightning_pp.telemetry import Finding
from lightning_pp.telemetry.diagnosis import diagnose
from lightning_pp.telemetry.diagnosis.collection import NUM_STEPS

BATCH_SIZE = 8


class Trained(L.LightningModule):
    """An architecture with an optimizer."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.model = model
        model.log = lambda name, value: None  # type: ignore[method-assign]

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def findings_of(name: str) -> list[Finding] | None:
    """Trains a model of transformers, ``task/type`` or the name of a case; on rank 0 all findings."""
    torch.manual_seed(1)
    make: Callable[[], nn.Module]
    make, batch = CASES[name] if name in CASES else generic(*name.split("/"))  # type: ignore[arg-type]
    monitor = PipelineMonitor(log_timeline=False)
    strategy = PipelineParallelStrategy(2, num_microbatches=4, schedule="zb_h1", check_first_batches=False)
    run = trainer(strategy=strategy, callbacks=[monitor])
    batches = [batch(BATCH_SIZE) for _ in range(NUM_STEPS + 2)]
    with telling_everything():
        run.fit(Trained(make()), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return None if monitor.report is None else list(monitor.report.findings)


@contextmanager
def telling_everything() -> Iterator[None]:
    """Within, a diagnosis tells whatever it has found, however little it saves and however noisy the machine."""
    before = diagnose.WORTH_TELLING, diagnose.MOST_DIFFERENCE
    diagnose.WORTH_TELLING, diagnose.MOST_DIFFERENCE = -1.0, 100.0
    try:
        yield
    finally:
        diagnose.WORTH_TELLING, diagnose.MOST_DIFFERENCE = before
