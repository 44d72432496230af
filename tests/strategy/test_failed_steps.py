"""A step that fails on one rank ends the run on all of them, and the next run in the same processes starts clean."""

from __future__ import annotations

import gc
import itertools
import re
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor, nn

from lightning_pp import PipelineParallelStrategy

NUM_STAGES = 3
FAILING_BATCH = 2


KINDS = itertools.cycle(("mean", "sum"))


class Fails(Blocks):
    """Fails where ``place`` says, on the rank that ``rank`` says or on all, once."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.rank = "nowhere", -1

    def is_time(self, place: str) -> bool:
        here = self.global_rank if self.rank < 0 else self.rank
        at = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        return self.place == place and self.global_rank == here and at == FAILING_BATCH and self.trainer.training

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.is_time("backward") and type(block.bias) is nn.Parameter:
                block.bias.register_hook(lambda gradient: self.fail(gradient) if self.is_time("backward") else None)
            x = x + torch.tanh(block(x))
        return self.head(x).squeeze(-1)

    def fail(self, _: Any) -> None:
        raise FloatingPointError("the user's own error")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.is_time("forward"):
            self.fail(None)
        if self.is_time("interrupt"):
            raise KeyboardInterrupt
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.is_time("logged value"):
            self.log("odd", loss, reduce_fx=next(KINDS))  # another one in each run
        if self.is_time("output"):
            return {"loss": loss, "function": lambda: 1}
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_time("hook"):
            self.fail(None)


def fitted(run: pl.Trainer, module: Fails, checkpoint: str | None) -> dict[str, Tensor]:
    run.fit(module, loader(num_samples=16), ckpt_path=checkpoint)
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


Outcome = tuple[str, int, list[str], bool]


def fail_and_fit_again(folder: Path, cases: list[tuple[str, int]], replicas: int) -> list[Outcome]:
    """Each case: what the failed run raised here, in which batch, threads left, whether the next is as without it."""
    devices = NUM_STAGES * replicas
    run = trainer(
        devices, PipelineParallelStrategy(NUM_STAGES, replicas, num_microbatches=4, check_first_batches=False)
    )
    module = Fails()
    checkpoint = str(folder / "first.ckpt")
    fitted(run, module, None)
    run.save_checkpoint(checkpoint)
    run.fit_loop.max_epochs = 2
    expected = fitted(run, module, checkpoint)
    outcomes = []
    for module.place, module.rank in cases:
        error = "none"
        try:
            fitted(run, module, checkpoint)
        except (Exception, SystemExit) as raised:
            error = f"{type(raised).__name__}: {raised}"
        module.place = "nowhere"
        batch = run.fit_loop.epoch_loop.batch_progress.current.ready - 1
        found = fitted(run, module, checkpoint)
        same = all(torch.equal(found[name], weight) for name, weight in expected.items())
        gc.collect()
        outcomes.append((error, batch, left_threads(), same))
    return outcomes


def left_threads() -> list[str]:
    """Names of more than one thread of a kind, after those that were told to end had time to."""
    names: list[str] = []
    for _ in range(100):
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipeline-")]
        if len(names) == len(set(names)):
            return []
        time.sleep(0.1)
    return names


CASES = [("backward", 2), ("interrupt", 0), ("output", -1)]
MORE_CASES = [
    *(("forward", rank) for rank in (-1, 0, 1, 2)),
    *(("backward", rank) for rank in (0, 1)),
    *(("hook", rank) for rank in (-1, 0, 1, 2)),
    *(("interrupt", rank) for rank in (-1, 1, 2)),
    ("logged value", -1),
]


def check(ranks: list[list[Outcome]], cases: list[tuple[str, int]]) -> None:
    for rank, outcomes in enumerate(ranks):
        for (place, culprit), (error, batch, threads, same) in zip(cases, outcomes, strict=True):
            where = f"{place} on rank {culprit}, seen by rank {rank}: {error}"
            assert same, f"the next run differs: {where}"
            assert not threads, f"{where} left threads {threads}"
            own = {
                "interrupt": "SystemExit",
                "logged value": "MisconfigurationException.*odd",
                "output": "TypeError.*cannot be sent",
            }.get(place, "the user's own error")
            cause = "raised KeyboardInterrupt" if place == "interrupt" else own
            told = rf"This rank ended because rank {culprit if culprit >= 0 else '.'} .*{cause}"
            # where all fail, one that waits may hear of another first
            pattern = {rank: own, -1: f"{own}|{told}"}.get(culprit, told)
            if place in ("logged value", "output"):  # of the last stage's report, which all ranks take up
                pattern = own
                assert batch == FAILING_BATCH, where
            assert re.search(pattern, error), where


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.nightly)], ids=["usual", "more"])
def test_every_rank_ends_and_the_next_run_is_as_if_nothing_had_been(
    pool: WorkerPool, tmp_path: Path, cases: list[tuple[str, int]]
) -> None:
    ranks = pool.run(fail_and_fit_again, tmp_path, cases, 1, world_size=NUM_STAGES, timeout=240)
    check(ranks, cases)
