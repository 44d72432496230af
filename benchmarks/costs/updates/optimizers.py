"""What an update of sharded parameters costs beside one of plain parameters: milliseconds, medians of nine runs.

    OMP_NUM_THREADS=1 python benchmarks/costs/updates/optimizers.py

AdamW over 500 parameters of 64 × 64 float32, of which one rank holds all, so that sharded and plain updates have the
same numbers to work on. "torch alone" gives the optimizer DTensors, as FSDP2 without lightning_pp does. Times are those
of the processor for this thread, which other work on the machine disturbs less than the clock.
"""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_pp.sharding.shard_updates import update_shards

NUM_PARAMETERS, SIZE, STEPS, RUNS = 500, 64, 15, 9
WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "no flag": {},
}


def make(mesh: DeviceMesh | None, flags: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer with gradients, sharded over ``mesh`` if there is one."""
    parameters = []
    for _ in range(NUM_PARAMETERS):
        weight, gradient = torch.randn(2, SIZE, SIZE)
        if mesh is not None:
            weight, gradient = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (weight, gradient))
        parameters.append(nn.Parameter(weight))
        parameters[-1].grad = gradient
    return torch.optim.AdamW(parameters, **flags)


def milliseconds(optimizers: list[torch.optim.Optimizer]) -> list[float]:
    """The median time of a step of each, after one that makes the states; their steps alternate."""
    times: list[list[float]] = [[] for _ in optimizers]
    for step in range(STEPS + 1):
        for optimizer, found in zip(optimizers, times, strict=True):
            start = time.thread_time()
            optimizer.step()
            if step > 0:
                found.append((time.thread_time() - start) * 1e3)
    return [statistics.median(found) for found in times]


def main() -> None:
    """Prints a table."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    print(f"{'':12}{'plain':>10}{'sharded':>10}{'torch alone':>13}{'sharded / plain':>17}")
    for name, flags in WAYS.items():
        runs = []
        for _ in range(RUNS):
            plain, sharded, alone = make(None, flags), make(mesh, flags), make(mesh, flags)
            update_shards(sharded)
            runs.append(milliseconds([plain, sharded, alone]))
        plain_ms, sharded_ms, alone_ms = (statistics.median(column) for column in zip(*runs, strict=True))
        ratio = statistics.median(run[1] / run[0] for run in runs)
        print(f"{name:12}{plain_ms:>10.1f}{sharded_ms:>10.1f}{alone_ms:>13.1f}{ratio:>17.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
