"""What CUDA devices alone show: waits of the host, memory that is taken, fused optimizers, numbers drawn on a device.

Where a CPU can do the same, it does so by day: there the test is seen to work. Two ranks share a single device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from live_memory import LiveMemory
from one_device import CUDA, placed
from parity_run import QUIET, whole_weights
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.strategy.parameters.precision import step_dtypes

NUM_RANKS = 2
Batch = tuple[Tensor, Tensor]
CLIP = 0.05
# what an operation takes for a moment is not estimated, nor are the workspaces of cuBLAS
WORKSPACE_BYTES = {"cpu": 0, "cuda": 96 << 20}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(pl.LightningModule):
    """A residual stack that is trained with AdamW."""

    def __init__(self, num_blocks: int, width: int, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.fused = fused

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return nn.functional.mse_loss(h, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # a large eps: an update does not depend on the sign of a gradient that is next to nothing
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-2, fused=self.fused)


def batches(number: int, size: int, width: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    data = [tuple(torch.randn(2, size, width, generator=generator)) for _ in range(number)]
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def trainer_on(device: str, *callbacks: pl.Callback, num_ranks: int = NUM_RANKS, **options: Any) -> pl.Trainer:
    of_trainer = {"max_epochs": options.pop("max_epochs", 1), "gradient_clip_val": options.pop("clip", None)}
    return pl.Trainer(
        **{**QUIET, **placed(device, num_ranks)},
        strategy="auto"
        if num_ranks == 1
        else PipelineParallelStrategy(num_ranks, num_microbatches=4, **options, check_first_batches=False),
        callbacks=list(callbacks),
        **of_trainer,
    )


class Waits(pl.Callback):
    """CUDA's own count of the host's waits, from the start of each training batch to its end."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self.found: list[list[str]] = []
        self.caught = caught

    def on_train_batch_start(self, *_: Any) -> None:
        self.caught.clear()
        torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.found.append([str(each.message) for each in self.caught if "synchronizing" in str(each.message)])


def waits_of_batches() -> list[list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        waits = Waits(caught)
        trainer_on("cuda", waits, schedule="zb_h1", clip=1.0).fit(Chain(5, 32, True), batches(5, 8, 32))
    return waits.found[2:]  # the first two batches are compared with parts of them, which reads them


@pytest.mark.gpu
def test_the_host_waits_once_in_a_batch_by_cudas_own_count(pool: WorkerPool) -> None:
    for of_rank in pool.run(waits_of_batches, world_size=NUM_RANKS):
        assert [len(found) <= 1 for found in of_rank] == [True] * 3, of_rank


class PeakMemory(LiveMemory):
    peak_bytes = 0

    def __torch_dispatch__(self, *args: Any) -> Any:
        result = super().__torch_dispatch__(*args)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result


class Peaks(pl.Callback):
    """The most that a rank holds in batches after the first two, with its state; on a device also up to the update."""

    def __init__(self) -> None:
        self.peak_bytes = self.up_to_update = 0
        self.live = PeakMemory()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 0 and batch[0].device.type == "cpu":
            self.live.__enter__()  # gradients and states are made from here on
        if batch_idx == 2:
            self.live.peak_bytes = 0
            if batch[0].is_cuda:
                torch.cuda.reset_peak_memory_stats()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            self.up_to_update = torch.cuda.max_memory_allocated()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.strategy.root_device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()
            return
        self.live.__exit__(None, None, None)
        self.peak_bytes = self.live.peak_bytes + sum(p.numel() * p.element_size() for p in module.parameters())


def held_and_estimated(device: str) -> tuple[int, float, int]:
    width, size = (128, 512) if device == "cpu" else (2048, 8192)
    peaks = Peaks()
    trainer = trainer_on(device, peaks, schedule="1f1b")
    trainer.fit(Chain(6 * NUM_RANKS, width, False), batches(4, size, width))
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineParallelStrategy)
    engine, (optimizer,) = strategy.engine, trainer.optimizers
    assert engine.last_training_step is not None
    schedule, _ = engine.last_training_step
    split, dtypes = engine.split, step_dtypes(strategy.precision_plugin)
    model = MemoryModel.of(strategy.options.sharding, strategy.sizes.data_parallel_shard, dtypes, optimizer=optimizer)
    estimate = model.estimate(split.record, split.partition, split.placement, split.parameter_sizes, schedule)
    memory = estimate.ranks[engine.rank]
    assert memory.activations_bytes is not None
    estimated = memory.peak_bytes + WORKSPACE_BYTES[device]
    return peaks.peak_bytes, estimated, peaks.up_to_update


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.nightly), CUDA])
def test_a_training_holds_what_device_memory_counts(
    pool: WorkerPool, record_property: Callable[[str, object], None], device: str
) -> None:
    found = pool.run(held_and_estimated, device, world_size=NUM_RANKS)
    record_property("figure", f"MiB held, counted, held up to the update: {[[n / 2**20 for n in of] for of in found]}")
    for held, estimated, _ in found:
        assert 0.5 < held / estimated < 1.15


def trained_in_two_parts(device: str, num_ranks: int, folder: Path) -> list[dict[str, Tensor]]:
    """The weights of this rank after an epoch, which is saved, and after another, to which a new Trainer goes on."""
    found = []
    for num_epochs in (1, 2):
        module = Chain(5, 32, num_ranks > 1)
        trainer = trainer_on(device, num_ranks=num_ranks, max_epochs=num_epochs, clip=CLIP, sharding="full_shard")
        trainer.fit(module, batches(2, 8, 32), ckpt_path=folder / "saved.ckpt" if num_epochs == 2 else None)
        trainer.save_checkpoint(folder / "saved.ckpt")
        found.append(whole_weights(module))
    return found


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_fused_updates_and_a_resume_are_those_of_one_device(pool: WorkerPool, tmp_path: Path, device: str) -> None:
    (expected,) = pool.run(trained_in_two_parts, "cpu", 1, tmp_path / "alone", world_size=1)
    ranks = pool.run(trained_in_two_parts, device, NUM_RANKS, tmp_path, world_size=NUM_RANKS)
    for part, whole in enumerate(expected):
        weights = ranks[0][part] | ranks[1][part]
        assert weights.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


class Augmented(Chain):
    """Adds noise to its batches on the device, and drops on its first stage alone."""

    def __init__(self) -> None:
        super().__init__(5, 8, True)
        self.blocks[0] = nn.Sequential(self.blocks[0], nn.Dropout(0.1))
        self.drawn: list[float] = []

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        x, y = batch
        noise = torch.rand_like(x)
        self.drawn.append(float(noise.double().sum()))
        return x + 0.01 * noise, y


def drawn_on(device: str) -> list[float]:
    """What each batch but the first drew on this rank, and what its generator gives next; ranks start apart."""
    module = Augmented()
    torch.manual_seed(100 + int(os.environ["RANK"]))
    trainer_on(device).fit(module, batches(4, 8, 8))
    # the first batch is looked at before the stages are known
    return [*module.drawn[1:], float(torch.rand((), device=device))]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_hooks_of_batches_draw_the_same_on_every_stage(pool: WorkerPool, device: str) -> None:
    first, second = pool.run(drawn_on, device, world_size=NUM_RANKS)
    assert first == second
    assert len(set(first)) == len(first) >= 4


def weights_with_early_updates(device: str) -> tuple[list[dict[str, Tensor]], tuple[int, int]]:
    """The weights after training without early updates and with them, and how many there were and were made again."""
    found = []
    for early in (False, True):
        module = Chain(5, 32, True)
        trainer = trainer_on(device, schedule="zb_h2", clip=1.53, post_validation=early, max_epochs=2)
        trainer.fit(module, batches(8, 8, 32))
        found.append({name: value.detach().cpu() for name, value in module.named_parameters() if not is_fake(value)})
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineParallelStrategy)
    validation = strategy.engine.post_validation
    return found, (validation.num_early, validation.num_made_again)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.nightly), CUDA])
def test_early_updates_give_the_weights_of_those_that_wait(pool: WorkerPool, device: str) -> None:
    for (waiting, early), (num_early, num_made_again) in pool.run(
        weights_with_early_updates, device, world_size=NUM_RANKS
    ):
        assert 0 < num_made_again < num_early
        assert early.keys() == waiting.keys()
        assert all(torch.equal(early[name], value) for name, value in waiting.items())
