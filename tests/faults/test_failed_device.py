"""What a device waits in ends with an exception, and a process whose device does not let go is ended, with the error.

No device is needed: the strategy is told that it has one, the groups are gloo's, and a device that does not let go is a
group that never ends.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
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
from lightning_pp.distributed.groups import default_timeout


class Failing(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise ValueError("bad value")
        return self.loss(batch)


def fit_twice() -> list[str]:
    """In a worker: two fits in one process, of which the first fails; what each said, and how long it took."""
    said = []
    with patch.object(PipelineParallelStrategy, "_has_device", PropertyMock(return_value=True)):
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


SCRIPT = """
import sys, threading
from unittest.mock import PropertyMock, patch
import lightning.pytorch as pl
from lightning_pp import PipelineParallelStrategy
from pipelined_fit import loader
from test_failed_device import Failing

class NeverEnds:
    def abort(self):
        threading.Event().wait()

if __name__ == "__main__":
    with (
        patch.object(PipelineParallelStrategy, "_has_device", PropertyMock(return_value=True)),
        patch.object(PipelineParallelStrategy, "_channels", lambda self: [NeverEnds()]),
    ):
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=PipelineParallelStrategy(2, num_microbatches=2),
                             max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(Failing(), loader(16))
"""


def test_a_device_that_does_not_let_go(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys; sys.path[:0] = {sys.path}\n{textwrap.dedent(SCRIPT)}")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, -9)  # Lightning kills the rank that is left when another has ended
    assert "ValueError: bad value" in done.stderr and "in training_step" in done.stderr
    assert "the device did not let go of this process 10 s after the exception" in done.stderr


def test_without_a_timeout_a_backend_has_its_own() -> None:
    assert default_timeout("gloo") == dist.default_pg_timeout == timedelta(minutes=30)
    assert default_timeout("nccl") == default_timeout("cpu:gloo,cuda:nccl") == timedelta(minutes=10)
