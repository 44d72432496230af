"""What a fit tells of itself: after the first measured steps, and at its end."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import VOCAB, TokenModel
from torch.utils.data import DataLoader, Dataset

from lightning_pp import PipelineMonitor, PipelineParallelStrategy
from lightning_pp.telemetry.diagnosis.collection import NUM_STEPS

LOADER_S = 0.3
NUM_BATCHES = NUM_STEPS + 3


class SlowTokens(Dataset[dict[str, torch.Tensor]]):
    """Batches that a loader has to wait for."""

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(LOADER_S)
        ids = torch.full((8, 12), index % VOCAB)
        return {"x": ids, "y": ids}


class _Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fit_with_a_slow_loader() -> dict[str, Any]:
    """Trains in this process, one of two."""
    kept, logger = _Kept(), rank_zero.log  # which Lightning replaces
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    monitor = PipelineMonitor()
    strategy = PipelineParallelStrategy(2, num_microbatches=4, schedule="zb_h1", check_first_batches=False)
    run = trainer(strategy=strategy, callbacks=[monitor])
    run.fit(TokenModel(), DataLoader(SlowTokens(), batch_size=None))
    profiler: Any = run.profiler  # type: ignore[attr-defined]
    return {
        "lines": [line for line in kept.lines if "Diagnosis of" in line],
        "diagnosis": monitor.report.diagnosis if monitor.report is not None else None,
        "findings": list(monitor.report.findings) if monitor.report is not None else None,
        "profiler": sorted(name for name in vars(profiler) if name in ("start", "stop")),
    }


@pytest.mark.nightly
def test_a_fit_that_waits_for_its_loader_says_so_once_and_in_its_report(pool: WorkerPool) -> None:
    first, last = pool.run(fit_with_a_slow_loader, world_size=2, timeout=120)
    (line,) = first["lines"]
    assert " measured steps of " in line and "for its loader, which has no worker processes" in line
    diagnosis = first["diagnosis"]
    assert diagnosis.is_explained and diagnosis.step_ms > 1e3 * LOADER_S
    assert first["findings"][0].cause == "data"
    assert first["findings"][0].override.startswith("data.num_workers=")
    assert 0 < first["findings"][0].gain_ms <= diagnosis.step_ms
    assert (last["lines"], last["diagnosis"]) == ([], None)
    assert first["profiler"] == last["profiler"] == []  # it is as it was
