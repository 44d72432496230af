"""Measuring links leaves nothing behind."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from lightning_pp.runtime.transport.link_speed import Link, measure_host_copies, measure_links

LINKS = [Link(0, 1, 1 << 10), Link(1, 0, 1 << 10), Link(0, 1, 8 << 20)]


def left_behind(number: int) -> tuple[dict[str, int], float]:
    """What this process has after measuring links that many times, and the time of a link, in milliseconds."""
    rank = dist.get_rank()
    times: dict[Link, float] = {}
    for index in range(number):
        times.update(measure_links(LINKS, rank, f"test {number}/{index}", torch.device("cpu")))
    gc.collect()
    dist.barrier()
    tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor]
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "connections": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "threads of Python": threading.active_count(),
        "bytes": sum(tensor.nbytes for tensor in tensors),
    }, min(times.values())


def measured_twice() -> tuple[dict[str, int], dict[str, int], float]:
    first, _ = left_behind(1)
    second, time = left_behind(6)
    return first, second, time


def test_measuring_links_leaves_no_group_connection_thread_or_memory(pool: WorkerPool) -> None:
    for first, second, time in pool.run(measured_twice, world_size=2, process_group=True):
        assert second == first
        assert second["bytes"] < 1 << 20
        assert time > 0


@pytest.mark.gpu
def test_twice_as_much_takes_twice_as_long_to_the_host() -> None:
    device = torch.device("cuda")
    one, two = (measure_host_copies(num_bytes, device) for num_bytes in (1 << 25, 1 << 26))
    assert 0 < one < two < 4 * one
    assert one > 1e3 * (1 << 25) / (200 << 30), "no host is as fast as 200 GiB/s"
