"""Every mistake gets an error on every rank that names the culprit, the numbers and the fix, and nothing hangs."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from pipelined_fit import fit, loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor

from lightning_pp import PipelineParallelStrategy
from lightning_pp.schedule import StageCosts

LONGEST_S = 60.0


class ManualOptimization(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Blocks):
    def backward(self, loss: torch.Tensor) -> None:
        (2 * loss).backward()


class WrappedBackward(Blocks):
    """A wrapper that looks like what it wraps, as tools that count calls put on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.backward = functools.update_wrapper(functools.partial(Blocks.backward, self), Blocks.backward)


class TwoOptimizers(Blocks):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.blocks.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)]


class UsesLBFGS(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class EvaluatesTwice(torch.optim.SGD):
    """As sharpness-aware minimisation does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


class UsesClosure(Blocks):
    def configure_optimizers(self) -> Any:
        return EvaluatesTwice(self.parameters(), lr=0.1)


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


class StepsItsScheduler(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class TakesIterator(Blocks):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


def fit_with(module: type[Blocks], **options: Any) -> None:
    fit(module(), strategy=PipelineParallelStrategy(**{"pipeline_parallel_size": 2, "num_microbatches": 2, **options}))


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


def fit_pruning() -> None:
    fit(Blocks(), callbacks=[ModelPruning("l1_unstructured", parameter_names=["weight"])])


def check_everywhere(pool: WorkerPool, pattern: str, function: Any, *args: Any, **kwargs: Any) -> None:
    report = pool.run(function, *args, world_size=2, timeout=LONGEST_S, expect_failure=True, **kwargs)
    for rank, failure in enumerate(report.failures):
        assert failure is not None, f"rank {rank} went on"
        assert re.search(pattern, failure.message), f"rank {rank} says: {failure.type}: {failure.message}"


@pytest.mark.by_day(4)
@pytest.mark.parametrize(
    ("module", "pattern"),
    [
        (ManualOptimization, r"ManualOptimization sets automatic_optimization=False.*return the loss"),
        (OwnBackward, r"OwnBackward overrides backward, which a pipeline never calls.*training_step"),
        (WrappedBackward, r"WrappedBackward overrides backward, which a pipeline never calls"),
        (TwoOptimizers, r"TwoOptimizers returned several optimizers.*parameter groups"),
        (UsesLBFGS, r"LBFGS.*first-order optimizer"),
        (UsesClosure, r"EvaluatesTwice\.step needs a closure.*one forward and backward per step"),
        (ReadsItem, r"test_bad_input\.py:\d+ in forward reads a value.*'blocks\.1' is called after it"),
        (Branches, r"test_bad_input\.py:\d+ in forward reads a value.*'blocks\.1' is called after it"),
        (ReturnsNoLoss, r"training_step returned dict without a loss.*'loss'"),
        (ReturnsManyLosses, r"ReturnsManyLosses returned a loss of shape \(2,\).*mean"),
        (DetachesItsLoss, r"DetachesItsLoss.*does not depend on any parameter.*detach"),
        (StepsItsScheduler, r"training_step changes the lr of group 0 of optimizer 0 each time.*on_train_batch_start"),
        (TakesIterator, r"dataloader_iter.*\(batch, batch_idx\)"),
    ],
)
def test_module_that_cannot_be_pipelined(pool: WorkerPool, module: type[Blocks], pattern: str) -> None:
    check_everywhere(pool, pattern, fit_with, module)


def test_callbacks_that_need_all_stages(pool: WorkerPool) -> None:
    check_everywhere(pool, r"ModelPruning cannot be used in a pipeline.*Prune the module on one device", fit_pruning)


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"data_parallel_size": 3}, r"2 x data_parallel_size=3 = 6, but the run has 2 devices"),
        ({"pipeline_parallel_size": 3}, r"pipeline_parallel_size=3 does not divide the 2 devices"),
        (
            {"schedule": "interleaved_1f1b", "stages_per_rank": 5},
            r"10 stages need at least 10 units, but the step calls 5",
        ),
        ({"units": "layers.*"}, r"'layers\.\*' matches none.*blocks\.0"),
        ({"split_points": ["block.2"]}, r"'block\.2'.*not a unit.*blocks\.2"),
        ({"split_points": "block.2"}, r"'block\.2'.*not a unit.*blocks\.2"),
        ({"split_points": ["blocks.1", "blocks.2"]}, r"split_points names 2 units.*2 stages need 1 cuts"),
    ],
)
def test_sizes_and_cuts_that_do_not_fit(pool: WorkerPool, options: dict[str, Any], pattern: str) -> None:
    check_everywhere(pool, pattern, fit_with, Blocks, **options)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"schedule": "zb_h7"}, r"unknown schedule 'zb_h7'.*1f1b.*zb_h1.*auto.*\.csv file"),
        ({"schedule": "zb_v", "stages_per_rank": 3}, r"stages_per_rank is 3, but zb_v allows exactly 2"),
        ({"schedule": "auto", "stages_per_rank": 0}, r"stages_per_rank is 0, but auto allows 1 or more"),
        ({"schedule": "nowhere.csv"}, r"cannot read the schedule nowhere\.csv"),
        ({"costs": "nowhere.json"}, r"cannot read the costs nowhere\.json"),
        ({"costs": 3}, r"costs=3 must be StageCosts, the path"),
        ({"memory_limit_gib": 0}, r"memory_limit_gib=0 must be a number above 0"),
        ({"num_profiled_batches": 0}, r"num_profiled_batches=0 must be an integer of at least 1"),
        ({"search_seconds": 5}, r"search_seconds=5 is for schedule='auto'; the schedule is 'zb_h1'"),
        ({"schedule": "auto", "search_seconds": -1}, r"search_seconds=-1 must be a number of at least 0"),
        ({"whole_batch_loss": "yes"}, r"whole_batch_loss='yes' must be True or False"),
        ({"num_microbatches": 0}, r"num_microbatches=0"),
        ({"num_microbatches": True}, r"num_microbatches=True must be an integer"),
        ({"activation_checkpointing": 3}, r"activation_checkpointing=3 must be True"),
        ({"pipeline_parallel_size": 0}, r"pipeline_parallel_size=0"),
        ({"schedule": "1f1b", "stages_per_rank": 2}, r"stages_per_rank is 2.*1f1b"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        PipelineParallelStrategy(**options)


FILES = {
    "deadlock.csv": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
    "forward.csv": "0F0\n1F0\n",
    "good.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "three.csv": "0F0,0B0\n1F0,1B0\n2F0,2B0\n",
}


@pytest.mark.parametrize(
    ("name", "options", "pattern"),
    [
        ("deadlock", {}, r"(?s)deadlock: rank 0 before 0B0 \(cell 1\) waits for 1I or B0 of rank 1.*\[0B0\]"),
        ("forward", {}, r"forward\.csv has no backward"),
        ("good", {"stages_per_rank": 2}, r"stages_per_rank=2, but .*good\.csv has 2 stages on 2 ranks"),
        ("good", {"pipeline_parallel_size": 4}, r"good\.csv' has rows for 2 ranks, but the pipeline has 4. Set"),
        (
            "good",
            {"num_microbatches": 3},
            r"num_microbatches=3, but .*good\.csv is for 2 microbatches. Set num_microbatches=2 \(or 'auto'",
        ),
    ],
)
def test_schedules_in_files_that_cannot_be_trained_with(
    tmp_path: Any, name: str, options: dict[str, Any], pattern: str
) -> None:
    path = tmp_path / f"{name}.csv"
    path.write_text(FILES[path.name])
    with pytest.raises(ValueError, match=pattern):
        PipelineParallelStrategy(schedule=str(path), **options)


def test_a_file_for_other_ranks_than_there_are(pool: WorkerPool, tmp_path: Any) -> None:
    (tmp_path / "three.csv").write_text(FILES["three.csv"])
    options = {"schedule": str(tmp_path / "three.csv"), "pipeline_parallel_size": "auto", "num_microbatches": "auto"}
    check_everywhere(pool, r"rows for 3 ranks, but the pipeline has 2. Set", fit_with, Blocks, **options)


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (
            {"schedule": "auto", "stages_per_rank": 1},
            r"memory_limit_gib=1e-09: .*too small.*smallest limit that works is \d",
        ),
        ({"schedule": "zb_h2"}, r"memory_limit_gib=1e-09: zb_h2 holds .*smallest limit that works for it is \d"),
        (
            {"schedule": "auto", "costs": StageCosts([1.0] * 3, 1, 1)},
            r"costs are for 3 stages, but 2 ranks have a mult",
        ),
        (
            {"costs": StageCosts([1.0] * 4, 1, 1), "stages_per_rank": 1},
            r"costs are for 4 stages, but 2 ranks have 2 of",
        ),
    ],
)
def test_what_no_schedule_can_keep_to(pool: WorkerPool, options: dict[str, Any], pattern: str) -> None:
    """Found out on one rank, told on every one."""
    limit = {} if "costs" in options else {"memory_limit_gib": 1e-9}
    check_everywhere(pool, pattern, fit_with, Blocks, **limit, **options)


def test_checkpoint_of_another_model(pool: WorkerPool, tmp_path: Any) -> None:
    path = str(tmp_path / "other.ckpt")
    pool.run(save_other_model, path, world_size=2)
    check_everywhere(pool, r"blocks\.4\.weight", fit_from, path)


def test_missing_checkpoint(pool: WorkerPool, tmp_path: Any) -> None:
    check_everywhere(pool, r"nowhere\.ckpt", fit_from, str(tmp_path / "nowhere.ckpt"))


def test_module_that_another_strategy_split(pool: WorkerPool) -> None:
    check_everywhere(pool, r"Another PipelineParallelStrategy split this", fit_split_module)
