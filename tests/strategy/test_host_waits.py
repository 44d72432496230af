"""Between the first and the last action of a step the host asks the device for nothing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from host_waits import HostWaits
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import grad_norm
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks

from lightning_pp import PipelineParallelStrategy
from lightning_pp.runtime.executor import PipelineExecutor
from lightning_pp.strategy.step import refusals


class Logs(Blocks):
    """Logs; each unit may have a parameter that gets no gradient."""

    def __init__(self, has_unused: bool = True) -> None:
        super().__init__(6)
        for block in self.blocks if has_unused else ():
            block.unused = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LogsNorms(Blocks):
    """Logs the norms of all its gradients."""

    def __init__(self) -> None:
        super().__init__(6)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, 2))


class Masked(Blocks):
    """Its loss and two values that it logs are means of as many rows as a mask of the batch keeps."""

    def __init__(self) -> None:
        super().__init__(6)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        mask = (x[:, 0] > -0.5).float()
        errors = (self(x) - y).square()
        self.log("kept", (errors * mask).sum() / mask.sum().clamp(min=1))
        left = 1 - mask
        self.log("left", (errors * left).sum() / left.sum().clamp(min=1))
        return (errors * mask).sum() / (mask.sum() + 1e-3)


def waits_within_programs(
    options: dict[str, Any], module: type[pl.LightningModule] = Logs, **of_trainer: Any
) -> tuple[list[str], int]:
    found: list[str] = []
    number = 0
    run = PipelineExecutor.run

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        with HostWaits() as waits:
            result = run(*args, **kwargs)
        found.extend(waits.found)
        return result

    PipelineExecutor.run = watched  # type: ignore[method-assign]
    try:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=options["pipeline_parallel_size"] * options.get("data_parallel_size", 1),
            strategy=PipelineParallelStrategy(num_microbatches=2, check_first_batches=False, **options),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            **of_trainer,
        )
        trainer.fit(module(), loader(num_samples=24))
    finally:
        PipelineExecutor.run = run  # type: ignore[method-assign]
    return found, number


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sharding", ["replicate", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_no_program_waits_for_the_device(pool: WorkerPool, schedule: str, sharding: str) -> None:
    options = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "schedule": schedule, "sharding": sharding}
    for found, number in pool.run(waits_within_programs, options, gradient_clip_val=1.0, world_size=4):
        assert number >= 3
        assert sorted(set(found)) == []


class WaitsOfBatches(pl.Callback):
    """What happens from the start of each training batch to its end."""

    def __init__(self, waits: HostWaits) -> None:
        self.waits = waits
        self.found: list[list[str]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.waits.found.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append([line for line in self.waits.found if "the caller" not in line])


def waits_of_batches(
    mode: str,
    clip: float | None,
    has_unused: bool,
    replicas: int = 2,
    module: type[pl.LightningModule] | None = None,
    precision: Precision | None = None,
) -> list[list[str]]:
    with HostWaits() as waits:
        callback = WaitsOfBatches(waits)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2 * replicas,
            strategy=PipelineParallelStrategy(2, replicas, 2, on_nonfinite=mode, check_first_batches=False),  # type: ignore[arg-type]
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            gradient_clip_val=clip,
            callbacks=[callback],
            plugins=precision,
        )
        trainer.fit(Logs(has_unused) if module is None else module(), loader(num_samples=40))
    return callback.found[2:]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("mode", "clip", "has_unused", "most"),
    [
        ("error", None, False, 1),
        ("error", 1.0, False, 1),
        ("skip", None, False, 1),
        ("skip", 1.0, False, 1),
        ("ignore", None, False, 0),
        ("ignore", 1.0, False, 0),
        # and once for parameters that got no gradient here, to know whether they got one elsewhere
        ("error", 1.0, True, 2),
        ("ignore", None, True, 1),
    ],
)
def test_a_batch_waits_once_to_know_whether_its_gradients_are_finite(
    pool: WorkerPool, mode: str, clip: float | None, has_unused: bool, most: int
) -> None:
    for of_rank in pool.run(waits_of_batches, mode, clip, has_unused, world_size=4):
        assert len(of_rank) >= 3
        for found in of_rank:
            assert len(found) <= most, found


def waits_of_float16(clip: float | None) -> list[list[str]]:
    """In a worker: a CPU computes ``16-mixed`` as well once nothing refuses it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    with mock.patch.object(refusals, "refuse_precision"):
        return waits_of_batches("error", clip, False, precision=MixedPrecision("16-mixed", "cpu", scaler))


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.nightly), 1.0])
def test_float16_waits_once_to_know_whether_the_step_is_skipped(pool: WorkerPool, clip: float | None) -> None:
    for of_rank in pool.run(waits_of_float16, clip, world_size=4):
        assert len(of_rank) >= 3
        assert {len(found) for found in of_rank} == {1}, of_rank


def test_norms_of_all_gradients_are_read_at_once(pool: WorkerPool) -> None:
    for of_rank in pool.run(waits_of_batches, "ignore", None, False, 2, LogsNorms, world_size=4):
        assert len(of_rank) >= 3
        assert {len(found) for found in of_rank} == {1}, of_rank


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_what_a_batch_counts_is_copied_at_once(pool: WorkerPool, replicas: int) -> None:
    ranks = pool.run(waits_of_batches, "ignore", None, False, replicas, Masked, world_size=2 * replicas)
    assert max(len(found) for of_rank in ranks for found in of_rank) > 0, "the mask is not counted at all"
    for of_rank in ranks:
        assert len(of_rank) >= 3
        for found in of_rank:
            # what replicas have told each other is on the host, and comparing it there waits for nothing
            waits = [line for line in found if replicas == 1 or not line.startswith("equal at ")]
            # with replicas once to tell the others, and once more to see that no count depends on another one
            assert len(waits) <= replicas, waits


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_no_program_waits_for_what_a_batch_counts(pool: WorkerPool, replicas: int) -> None:
    """Not even the first one, before which nobody knows that replicas have several counts."""
    options = {"pipeline_parallel_size": 2, "data_parallel_size": replicas, "schedule": "1f1b"}
    for found, number in pool.run(waits_within_programs, options, Masked, world_size=2 * replicas):
        assert number >= 3
        assert sorted(found) == []


def test_what_would_wait_is_noticed() -> None:
    there = torch.ones(2)
    with HostWaits() as waits:
        float(there.sum())
        there.tolist()
        torch.tensor([1.0], device=there.device)
        bool((there > 0).all())
        torch.full((2,), 1.0, device=there.device)
    assert len(waits.found) == 4
