"""After a failure that is caught on all ranks a new Trainer works in the same processes, and all is as before."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, Dataset

from lightning_pp import PipelineParallelStrategy

NUM_RANKS = 2
# not on the module, whose attributes are put back after a step that is only recorded
HAS_FAILED: set[str] = set()


class Samples(Dataset[Any]):
    """Each of the batches of four has a length of its own, if asked."""

    def __init__(self, module: Fails) -> None:
        self.module = module

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            self.module.reached("loading")
        x = torch.linspace(-1, 1, 8) * (1 + index)
        return x, x.sum().tanh()


class Fails(Blocks):
    """Fails once, at ``place`` on ``rank``."""

    def __init__(self, place: str = "nowhere", rank: int = -1) -> None:
        super().__init__()
        self.place, self.rank = place, rank

    def reached(self, place: str) -> None:
        if place == self.place and int(os.environ["RANK"]) == self.rank and place not in HAS_FAILED:
            HAS_FAILED.add(place)
            raise ConnectionError("the user's own error")

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 2:
                self.reached("dry run" if self.trainer.global_step == 0 and not self.trainer.validating else "step")
            x = x + torch.tanh(block(x))
        return self.head(x).squeeze(-1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        hidden = self.blocks[1](self.blocks[0](x[:, :8]))
        self.reached("look-up in validation")
        self.log("val_loss", (self.head(hidden).squeeze(-1) - y).pow(2).mean())

    def configure_optimizers(self) -> Any:
        self.reached("configure_optimizers")
        return super().configure_optimizers()

    def on_train_batch_end(self, *_: Any) -> None:
        self.reached("hook")

    def on_validation_end(self) -> None:
        self.reached("end of validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reached("saving")


def fit(module: Fails, folder: str) -> pl.Trainer:
    run = trainer(
        NUM_RANKS,
        PipelineParallelStrategy(NUM_RANKS, num_microbatches=2, check_first_batches=False),
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=3)],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    run.fit(module, DataLoader(Samples(module), 4), DataLoader(Samples(Fails()), 4))
    return run


def weights(module: Fails) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters() if type(parameter).__name__ == "Parameter"]


def state_of_process() -> dict[str, Any]:
    """What a run must leave as it was; threads and sockets get a moment to end."""
    gc.collect()
    end = time.monotonic() + 5
    names: list[str] = []
    while time.monotonic() < end:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipeline-")]
        if not names:
            break
        time.sleep(0.05)
    kinds = [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in open_files()]
    return {
        "threads": names,
        "groups": len(distributed_c10d._world.pg_map),
        "files": {kind: kinds.count(kind) for kind in kinds},
        "signals": [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "forward": torch.nn.Linear.forward,
        "backward": torch.Tensor.backward,
    }


def open_files() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}"):
            yield fd


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """All hooks of all modules, and what hides their methods."""
    return [
        (
            name,
            [key for key in vars(child) if key in ("forward", "log", "_call_impl")],
            [len(hooks) for key, hooks in vars(child).items() if key.endswith("_hooks")],
        )
        for name, child in module.named_modules()
    ]


def fail_and_begin_anew(folder: str, cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    expected = Fails()
    fit(expected, f"{folder}/expected")
    hooks = hooks_of(expected)
    wanted = weights(expected)
    del expected
    before = state_of_process()
    outcomes = []
    for number, (place, rank) in enumerate(cases):
        HAS_FAILED.clear()
        module, error = Fails(place, rank), "none"
        try:
            fit(module, f"{folder}/{number}/failed")
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        failed_hooks = hooks_of(module)
        del module
        again = Fails()
        fit(again, f"{folder}/{number}/again")
        same = all(torch.equal(one, other) for one, other in zip(weights(again), wanted, strict=True))
        new_hooks = hooks_of(again)
        del again
        after = state_of_process()
        outcomes.append(
            {
                "error": error,
                "same": same,
                "hooks": (hooks, failed_hooks, new_hooks),
                "changed": {name: (before[name], after[name]) for name in before if before[name] != after[name]},
            }
        )
    sys.excepthook = sys.__excepthook__
    return outcomes


CASES = [("dry run", 1), ("saving", 0)]
MORE_CASES = [
    ("configure_optimizers", 0), ("loading", 1), ("step", 1), ("hook", 1), ("look-up in validation", 0),
    ("end of validation", 1),
]  # fmt: skip


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.nightly)], ids=["usual", "more"])
def test_a_new_trainer_works_after_any_failure(pool: WorkerPool, tmp_path: Path, cases: list[tuple[str, int]]) -> None:
    ranks = pool.run(fail_and_begin_anew, str(tmp_path), cases, world_size=NUM_RANKS, timeout=240)
    for rank, outcomes in enumerate(ranks):
        for (place, culprit), outcome in zip(cases, outcomes, strict=True):
            where = f"{place} on rank {culprit}, seen by rank {rank}: {outcome}"
            own = "ConnectionError: the user's own error"
            told = rf"This rank ended because rank {culprit} .*raised {own} at .*in reached"
            assert re.search(own if rank == culprit else told, outcome["error"]), where
            assert outcome["same"], f"the new Trainer's weights differ: {where}"
            assert not outcome["changed"], where
            as_before, after_failure, after_new_run = outcome["hooks"]
            assert as_before == after_new_run, where
            assert as_before == after_failure or place in ("dry run", "configure_optimizers"), where


def fit_the_same_trainer_again(folder: str) -> list[str]:
    """A trainer whose ranks have made new connections, after one was woken in a collective of Lightning's."""
    HAS_FAILED.clear()
    module, told = Fails("end of validation", 1), []
    run = trainer(
        NUM_RANKS,
        PipelineParallelStrategy(NUM_RANKS, num_microbatches=2, check_first_batches=False),
        num_sanity_val_steps=0,
    )
    data = DataLoader(Samples(module), 4), DataLoader(Samples(Fails()), 4)
    for _ in range(2):
        try:
            run.fit(module, *data)
        except Exception as error:
            told.append(str(error))
    other = dist.new_group(list(range(NUM_RANKS)))
    fit(Fails(), folder)
    votes = torch.ones(())
    dist.all_reduce(votes, group=other)
    assert votes == NUM_RANKS
    return told


def test_a_trainer_of_connections_that_have_ended_says_so(pool: WorkerPool, tmp_path: Path) -> None:
    for told in pool.run(fit_the_same_trainer_again, str(tmp_path), world_size=NUM_RANKS):
        assert len(told) == 2 and "Make a new Trainer, strategy and module" in told[1], told
