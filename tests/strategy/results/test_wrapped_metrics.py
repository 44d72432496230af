"""Methods of a metric in whose place the user has put an object of their own, as tests do with Mocks."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_pp import PipelineParallelStrategy


class Watched(Blocks):
    """Has a metric one of whose methods is watched, and asks the watcher in each step."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.watcher = Mock(wraps=getattr(self.mean, method))
        setattr(self.mean, method, self.watcher)
        self.method = method

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean(batch[0].mean())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        watcher = getattr(self.mean, self.method)
        watcher.reset_mock()
        watcher.note = batch_idx
        return loss


def fit_watched(method: str, stages: int | None) -> tuple[float, bool, int, int]:
    module = Watched(method)
    strategy = "auto" if stages is None else PipelineParallelStrategy(stages, num_microbatches=2)
    run = trainer(stages or 1, strategy, max_epochs=2)
    run.fit(module, loader())
    is_theirs = getattr(module.mean, method) is module.watcher
    return float(run.callback_metrics["mean"]), is_theirs, module.watcher.note, module.watcher.call_count


@pytest.mark.by_day(1)
@pytest.mark.parametrize("method", ["reset", "update", "compute", "forward"])
def test_a_metric_with_a_watched_method_trains(pool: WorkerPool, method: str) -> None:
    expected = fit_watched(method, None)
    assert fit_watched(method, 1) == expected
    ranks = pool.run(fit_watched, method, 2, world_size=2)
    *_, last = ranks
    assert [rank[:2] for rank in ranks] == [(pytest.approx(expected[0]), True)] * 2
    assert last[2] == expected[2] == 2
    if method in ("reset", "compute"):  # called when an epoch ends, after the last step has set the count to zero
        assert last[3] == expected[3] == 1
