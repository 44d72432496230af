"""``activation_offload=True``: the same training, less memory of the device, and what a plan says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from lightning_pp.schedule import ActionKind, StageCosts
from lightning_pp.strategy.parameters.precision import step_dtypes

Batch = tuple[Tensor, Tensor]
NUM_BATCHES = 2


class Block(nn.Module):
    """Saves tensors that share a memory (chunks of one product), one of them twice, and the results of operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.both = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(torch.sigmoid(gate) * value * self.scale * value)


class Chain(pl.LightningModule):
    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Peak(LiveMemory):
    """The most bytes that live at a time, but for those that ``on_host`` tells of."""

    def __init__(self, on_host: Callable[[], int]) -> None:
        super().__init__()
        self.peak_bytes, self._on_host = 0, on_host

    def __torch_dispatch__(self, *args: Any) -> Any:
        result = super().__torch_dispatch__(*args)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes - self._on_host())
        return result


class PeakOfLastBatch(pl.Callback):
    """The most that the last batch takes, of what is made in it; on CUDA with all that there was before."""

    def __init__(self) -> None:
        self.live: Peak | None = None
        self.peak_bytes = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        if batch_idx == NUM_BATCHES - 1 and batch[0].is_cuda:
            torch.cuda.reset_peak_memory_stats()
        elif batch_idx == NUM_BATCHES - 1:
            offloader = trainer.strategy.engine._executor.offloader
            self.live = Peak(lambda: offloader.host_bytes)
            self.live.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)
            self.peak_bytes = self.live.peak_bytes
        elif trainer.strategy.root_device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()


class Found(NamedTuple):
    weights: dict[str, Tensor]
    peak_bytes: int
    planned_bytes: int
    num_offloaded: int
    host_bytes: int


def trained(
    offload: bool,
    schedule: str,
    num_ranks: int,
    dtype: torch.dtype,
    width: int,
    rows: int,
    options: dict[str, Any],
    device: str = "cpu",
) -> Found:
    """In a worker: a training, the most that its last batch took, and what a plan has of microbatches."""
    # with given costs nothing is measured: a measured batch runs I and W apart, which rounds sums otherwise than B
    options = {"num_microbatches": 8, "costs": StageCosts(5.0, 5.0, 5.0), **options}
    num_replicas = options.get("data_parallel_size", 1)
    strategy = PipelineParallelStrategy(
        num_ranks, schedule=schedule, activation_offload=offload, check_first_batches=False, **options
    )
    module, peak = Chain(12, width).to(dtype), PeakOfLastBatch()
    generator = torch.Generator().manual_seed(3)
    data = [
        tuple(torch.randn(2, rows, width, generator=generator, dtype=dtype)) for _ in range(NUM_BATCHES * num_replicas)
    ]
    trainer = pl.Trainer(
        **{**QUIET, **placed(device, num_ranks * num_replicas)},
        strategy=strategy,
        precision="64-true" if dtype is torch.float64 else "32-true",
        callbacks=[peak],
        accumulate_grad_batches=2,
        max_epochs=1,
    )
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    engine = strategy.engine
    assert engine.last_training_step is not None
    program, split = engine.last_training_step[0], engine.split
    model = MemoryModel.of(strategy.options.sharding, 1, step_dtypes(strategy.precision_plugin))
    estimate = model.estimate(split.record, split.partition, split.placement, split.parameter_sizes, program)
    rank = estimate.ranks[engine.rank]
    return Found(
        whole_weights(module),
        peak.peak_bytes,
        (rank.activations_bytes or 0) + rank.recomputed_bytes + rank.edge_buffers_bytes,
        sum(action.kind is ActionKind.OFFLOAD for action in program.programs[engine.rank]),
        engine._executor.offloader.host_bytes,
    )


RUNS: list[Any] = [
    ("interleaved_1f1b", 2, {"data_parallel_size": 2, "sharding": "full_shard"}),
    ("interleaved_1f1b", 2, {}),
    ("1f1b", 3, {}),
    ("zb_h1", 3, {"costs": StageCosts(5.0, 10.0, 1.0)}),
    ("zb_v", 2, {}),
    ("1f1b", 3, {"activation_checkpointing": True}),
    ("zb_v", 2, {"activation_checkpointing": ["blocks.1", "blocks.2", "blocks.9"]}),
    ("gpipe", 2, {"whole_batch_loss": True}),
    ("interleaved_1f1b", 2, {"compile": {"backend": "aot_eager"}}),
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("schedule", "num_ranks", "options"), RUNS)
def test_a_training_is_the_same_bit_for_bit(
    pool: WorkerPool, schedule: str, num_ranks: int, options: dict[str, Any]
) -> None:
    world_size = num_ranks * options.get("data_parallel_size", 1)
    size = torch.float64, 32, 256
    without, with_it = (
        pool.run(trained, offload, schedule, num_ranks, *size, options, world_size=world_size)
        for offload in (False, True)
    )
    assert any(found.num_offloaded for found in with_it)
    for before, after in zip(without, with_it, strict=True):
        assert before.num_offloaded == before.host_bytes == after.host_bytes == 0 or after.num_offloaded
        assert after.host_bytes == 0
        assert before.weights.keys() == after.weights.keys()
        for name, value in before.weights.items():
            assert torch.equal(value, after.weights[name]), name


def test_a_rank_holds_less_by_what_the_plan_says(pool: WorkerPool) -> None:
    size = 4, torch.float32, 64, 3072
    options = {"num_microbatches": 12}
    without, with_it = (pool.run(trained, offload, "1f1b", *size, options, world_size=4) for offload in (False, True))
    for rank in (0, 1):
        before, after = without[rank], with_it[rank]
        saved, planned = before.peak_bytes - after.peak_bytes, before.planned_bytes - after.planned_bytes
        assert saved == pytest.approx(planned, rel=0.03)
        assert after.peak_bytes == pytest.approx(after.planned_bytes, rel=0.1)  # operations take some for a moment
        assert after.peak_bytes < 0.75 * before.peak_bytes


@pytest.mark.parametrize("device", [CUDA])
def test_a_device_holds_less_and_trains_the_same(pool: WorkerPool, device: str) -> None:
    # by given times there is time for all copies
    options = {"costs": StageCosts(50.0, 50.0, 50.0), "num_microbatches": 12}
    size = torch.float32, 2048, 12288
    without, with_it = (
        pool.run(trained, offload, "gpipe", 2, *size, options, device, world_size=2) for offload in (False, True)
    )
    for before, after in zip(without, with_it, strict=True):
        assert after.num_offloaded > 0
        assert after.peak_bytes < 0.75 * before.peak_bytes
        for name, value in before.weights.items():
            assert torch.equal(value, after.weights[name]), name
