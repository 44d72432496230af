"""Trainings of ranks that share a device are those of one device: whole, compiled, and with kernels by address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import CPU_BY_NIGHT, CUDA, TIMEOUT_S, moved_apart, take_place
from pool import WorkerPool
from raw_kernels import RawTanh
from torch import Tensor

from lightning_pp.doctor.checks.trainings import Batch, Block, Chain, batches, num_blocks_for

Record = Callable[[str, object], None]
Told = tuple[float, str]


class RawBlock(Block):
    """Computes what its parent does, by a kernel that gets addresses."""

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(RawTanh.apply(self.up(self.norm(x))))
        return x + change


class RawChain(Chain):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        plain, self.blocks = self.blocks, torch.nn.ModuleList(RawBlock() for _ in range(num_blocks))
        self.blocks.load_state_dict(plain.state_dict())


def fit_one_batch(device_type: str, options: dict[str, Any]) -> Told:
    """In a worker: one batch in double precision."""
    rank = take_place(device_type)
    num_blocks, data = num_blocks_for(rank), [(x.double(), y.double()) for x, y in batches(1, 16)]
    return moved_apart(rank, Chain(num_blocks), Chain(num_blocks), data, precision="64-true", **options)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"schedule": "1f1b"}),
        pytest.param(4, {"schedule": "zb_v"}, marks=pytest.mark.nightly),
        (4, {"schedule": "zb_h1", "data_parallel_size": 2, "sharding": "full_shard"}),
    ],
    ids=["1f1b", "zb_v", "replicas"],
)
@pytest.mark.parametrize("device_type", ["cpu", CUDA])
def test_one_batch(
    pool: WorkerPool, record_property: Record, device_type: str, num_ranks: int, options: dict[str, Any]
) -> None:
    told = pool.run(fit_one_batch, device_type, options, world_size=num_ranks, timeout=TIMEOUT_S)
    worst, name = max(told)
    record_property("figure", f"parameters moved apart by {worst:.1e} of their way")
    assert worst < 1e-9, name


def fit_compiled(device_type: str, schedule: str) -> tuple[Told, int]:
    """In a worker: three batches with units that Inductor compiles, and how many graphs it compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    rank = take_place(device_type)
    num_blocks, counter = num_blocks_for(rank), CompileCounterWithBackend("inductor")
    options = {"schedule": schedule, "compile": {"backend": counter}}
    return moved_apart(rank, Chain(num_blocks), Chain(num_blocks), batches(3, 16), **options), counter.frame_count


@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("device_type", [CPU_BY_NIGHT, CUDA])
def test_compiled_units(pool: WorkerPool, record_property: Record, device_type: str, schedule: str) -> None:
    results = pool.run(fit_compiled, device_type, schedule, world_size=2, timeout=2 * TIMEOUT_S)
    worst, name = max(told for told, _ in results)
    record_property("figure", f"{[number for _, number in results]} graphs; moved apart by {worst:.1e}")
    assert worst < 1e-3, name
    assert all(number > 0 for _, number in results)


class TanhLoss(Chain):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(torch.tanh(self(x)), y)


class RawLoss(TanhLoss):
    """Its loss needs a kernel that gets an address, after the last unit."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(RawTanh.apply(self(x)), y)


RAW: dict[str, tuple[type[Chain], type[Chain], dict[str, Any]]] = {
    "units": (RawChain, Chain, {}),
    "loss": (RawLoss, TanhLoss, {}),
    "loss that is rehearsed": (RawLoss, TanhLoss, {"dynamic_step": True}),
}


def fit_raw(device_type: str, which: str) -> Told:
    """In a worker: two batches with kernels that read and write by address."""
    rank = take_place(device_type)
    raw, plain, options = RAW[which]
    num_blocks = num_blocks_for(rank)
    return moved_apart(rank, raw(num_blocks), plain(num_blocks), batches(2, 16), schedule="zb_h1", **options)


@pytest.mark.parametrize("which", [pytest.param("loss", marks=pytest.mark.nightly), "units", "loss that is rehearsed"])
@pytest.mark.parametrize("device_type", ["cpu", CUDA])
def test_raw_kernels_run_on_memory_only(
    pool: WorkerPool, record_property: Record, device_type: str, which: str
) -> None:
    told = pool.run(fit_raw, device_type, which, world_size=2, timeout=TIMEOUT_S)
    worst, name = max(told)
    record_property("figure", f"parameters moved apart by {worst:.1e} of their way")
    assert worst < 1e-3, name
