"""What a device waits in ends with an exception, and a process whose device does not let go is ended, with the error.

No device is needed: the strategy is told that it has one, the groups are gloo's, and a device that does not let go is a
group that never ends.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import lightning.pytorch as pl
import torch.distributed as dist
from parity_run import QUIET
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks

from lightning_pp import PipelineParallelStrategy
from lightning_pp.distributed.groups import default_timeout, timeout_of_groups
from lightning_pp.strategy.faults import ends
from lightning_pp.strategy.pipeline import HeldPipeline


class Failing(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise ValueError("bad value")
        return self.loss(batch)


def fit_twice() -> list[str]:
    """In a worker: two fits in one process, of which the first fails; what each said, and how long it took."""
    said = []
    with patch.object(PipelineParallelStrategy, "has_device", PropertyMock(return_value=True)):
        for module in (Failing(), Blocks()):
            strategy = PipelineParallelStrategy(2, num_microbatches=2, timeout=timedelta(seconds=60))
            trainer = pl.Trainer(devices=2, strategy=strategy, max_epochs=1, **QUIET)
            start = time.monotonic()
            try:
                trainer.fit(module, loader(16))
                said.append("nothing")
            except (RuntimeError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
            assert time.monotonic() - start < 40
    return said


def test_groups_end_with_the_run_and_no_other_run_follows(pool: WorkerPool) -> None:
    first, second = pool.run(fit_twice, world_size=2, timeout=120)
    assert second[0] == "ValueError: bad value"
    assert "This rank ended because rank 1" in first[0] and "raised ValueError: bad value" in first[0]
    for said in (first[1], second[1]):
        assert said.startswith("RuntimeError: An exception ended an earlier run in this process")
        assert "ckpt_path=" in said


class NeverEnds:
    def abort(self) -> None:
        threading.Event().wait()


def fit_on_a_device_that_does_not_let_go(folder: Path) -> None:
    """In a worker, whose errors go to a file: a step fails, and the device never lets go."""
    output = os.open(folder / f"{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    with (
        patch.object(PipelineParallelStrategy, "has_device", PropertyMock(return_value=True)),
        patch.object(HeldPipeline, "channels", PropertyMock(return_value=[NeverEnds()])),
        patch.object(ends, "_ABORT_S", 1.0),
    ):
        strategy = PipelineParallelStrategy(2, num_microbatches=2)
        pl.Trainer(devices=2, strategy=strategy, max_epochs=1, **QUIET).fit(Failing(), loader(16))


def test_a_device_that_does_not_let_go(pool: WorkerPool, tmp_path: Path) -> None:
    run = fit_on_a_device_that_does_not_let_go
    report = pool.run(run, tmp_path, world_size=2, timeout=120, grace=1, expect_failure=True)
    ended = report.failures[1]
    assert ended is not None and (ended.type, ended.message) == ("WorkerDied", "exit code 1")
    told = (tmp_path / "1.txt").read_text()
    assert "ValueError: bad value" in told and "in training_step" in told
    assert "its device did not release it within 1 s after the exception" in told


def test_without_a_timeout_a_backend_has_its_own() -> None:
    assert default_timeout("gloo") == dist.default_pg_timeout == timedelta(minutes=30)
    assert default_timeout("nccl") == default_timeout("cpu:gloo,cuda:nccl") == timedelta(minutes=10)


def test_nccl_ends_a_process_a_minute_after_the_watchdog_can_name_who_stands() -> None:
    wanted = timedelta(seconds=90)
    assert timeout_of_groups(wanted, "cpu:gloo,cuda:nccl") == timedelta(seconds=150)
    assert timeout_of_groups(wanted, "gloo") == wanted
