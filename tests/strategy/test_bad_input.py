"""Every mistake gets an error on every rank that names the culprit, the numbers and the fix, and nothing hangs."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from pipelined_fit import Blocks, fit, loader, trainer
from pool import WorkerPool

from lightning_pp import PipelineParallelStrategy

LONGEST_S = 60.0


class ManualOptimization(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Blocks):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.blocks.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)]


class UsesLBFGS(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ReadsItem(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](x)
        scale = h.abs().max().item()  # the line that the message names
        for block in self.blocks[1:]:
            h = block(h / scale)
        return self.head(h).squeeze(-1)


class Branches(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:  # the line that the message names
            h = -h
        return self.head(self.blocks[1](h)).squeeze(-1)


class ReturnsNoLoss(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"prediction": self(batch[0])}


class ReturnsManyLosses(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch[0]) - batch[1]).square()


class DetachesItsLoss(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class TakesIterator(Blocks):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


class FailsOnOneRank(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            raise FloatingPointError("the user's own error")
        return loss


class DifferentBatches(Blocks):
    def train_dataloader(self) -> Any:
        return loader(seed=int(os.environ["RANK"]))


def fit_with(module: type[Blocks], **options: Any) -> None:
    fit(module(), strategy=PipelineParallelStrategy(**{"pipeline_parallel_size": 2, "num_microbatches": 2, **options}))


def fit_own_data(module: type[Blocks]) -> None:
    trainer().fit(module())


def fit_from(path: str) -> None:
    run = trainer()
    run.fit(Blocks(), loader(), ckpt_path=path)


def save_other_model(path: str) -> None:
    run = fit(Blocks(num_blocks=6, width=8), strategy=PipelineParallelStrategy(2, save_distributed_checkpoint=False))
    run.save_checkpoint(path)


def fit_split_module() -> None:
    module = Blocks()
    fit(module)
    fit(module)


def check_everywhere(pool: WorkerPool, pattern: str, function: Any, *args: Any, **kwargs: Any) -> None:
    report = pool.run(function, *args, world_size=2, timeout=LONGEST_S, expect_failure=True, **kwargs)
    for rank, failure in enumerate(report.failures):
        assert failure is not None, f"rank {rank} went on"
        assert re.search(pattern, failure.message), f"rank {rank} says: {failure.type}: {failure.message}"


@pytest.mark.parametrize(
    ("module", "pattern"),
    [
        (ManualOptimization, r"ManualOptimization sets automatic_optimization=False.*return the loss"),
        (TwoOptimizers, r"TwoOptimizers returned several optimizers.*parameter groups"),
        (UsesLBFGS, r"LBFGS.*first-order optimizer"),
        (ReadsItem, r"test_bad_input\.py:\d+ in forward reads a value.*'blocks\.1' is called after it"),
        (Branches, r"test_bad_input\.py:\d+ in forward reads a value.*'blocks\.1' is called after it"),
        (ReturnsNoLoss, r"training_step returned dict without a loss.*'loss'"),
        (ReturnsManyLosses, r"ReturnsManyLosses returned a loss of shape \(2,\).*mean"),
        (DetachesItsLoss, r"DetachesItsLoss.*does not depend on any parameter.*detach"),
        (TakesIterator, r"dataloader_iter.*\(batch, batch_idx\)"),
    ],
)
def test_module_that_cannot_be_pipelined(pool: WorkerPool, module: type[Blocks], pattern: str) -> None:
    check_everywhere(pool, pattern, fit_with, module)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"data_parallel_size": 3}, r"2 x data_parallel_size=3 = 6, but the run has 2 devices"),
        ({"pipeline_parallel_size": 3}, r"pipeline_parallel_size=3 does not divide the 2 devices"),
        (
            {"schedule": "interleaved_1f1b", "stages_per_rank": 5},
            r"10 stages need at least 10 units, and the step calls 5",
        ),
        ({"units": "layers.*"}, r"'layers\.\*' matches none.*blocks\.0"),
        ({"split_points": ["block.2"]}, r"'block\.2'.*not a unit.*blocks\.2"),
        ({"split_points": ["blocks.1", "blocks.2"]}, r"split_points names 2 units.*2 stages have 1 cuts"),
    ],
)
def test_sizes_and_cuts_that_do_not_fit(pool: WorkerPool, options: dict[str, Any], pattern: str) -> None:
    check_everywhere(pool, pattern, fit_with, Blocks, **options)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"schedule": "zb_h7"}, r"zb_h7.*1f1b.*zb_h1"),
        ({"schedule": "auto"}, r"'auto'.*choose one of.*zb_h1"),
        ({"num_microbatches": 0}, r"num_microbatches=0"),
        ({"pipeline_parallel_size": 0}, r"pipeline_parallel_size=0"),
        ({"schedule": "1f1b", "stages_per_rank": 2}, r"stages_per_rank is 2.*1f1b"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        PipelineParallelStrategy(**options)


def test_checkpoint_of_another_model(pool: WorkerPool, tmp_path: Any) -> None:
    path = str(tmp_path / "other.ckpt")
    pool.run(save_other_model, path, world_size=2)
    check_everywhere(pool, r"blocks\.4\.weight", fit_from, path)


def test_missing_checkpoint(pool: WorkerPool, tmp_path: Any) -> None:
    check_everywhere(pool, r"nowhere\.ckpt", fit_from, str(tmp_path / "nowhere.ckpt"))


def test_module_that_another_strategy_split(pool: WorkerPool) -> None:
    check_everywhere(pool, r"was split by another PipelineParallelStrategy", fit_split_module)


def test_stages_that_see_different_batches(pool: WorkerPool) -> None:
    check_everywhere(pool, r"Batch 0 differs between the stages.*seed_everything", fit_own_data, DifferentBatches)


def test_error_on_one_rank_ends_the_job(pool: WorkerPool) -> None:
    report = pool.run(fit_with, FailsOnOneRank, world_size=2, timeout=LONGEST_S, expect_failure=True)
    failed = report.failures[1]
    assert failed is not None and "the user's own error" in failed.message
    assert report.failures[0] is not None
    assert report.seconds < LONGEST_S
