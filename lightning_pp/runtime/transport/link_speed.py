"""Measures messages between ranks and copies to the host, while nothing else runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from lightning_pp.distributed.groups import pair_group

_NUM_WARM_UP = 2
_NUM_REPEATS = 5
_MOST_BYTES_MEASURED = 32 << 20
"""Longer ones are estimated from one of this size, since they would need the memory of a stage."""


@dataclass(frozen=True)
class Link:
    """A message of ``num_bytes`` between two ranks of a group, there and back."""

    first: int
    second: int
    num_bytes: int


def measure_links(links: Sequence[Link], rank: int, name: str, device: torch.device) -> dict[Link, float]:
    """Milliseconds of one way of each link: half the median round trip.

    Every rank of a link has to call this with the same links; they are measured one after the other, each over a
    channel of its own, which is gone afterwards with the memory that it has on the device.

    Args:
        links: All of them.
        rank: This one, as links name it.
        name: The same on all ranks, and used once in a job.
        device: Where messages lie.

    Returns:
        The links whose first rank is this one.
    """
    found = {}
    for link in dict.fromkeys(links):
        if rank not in (link.first, link.second):
            continue
        message = torch.zeros(max(1, link.num_bytes), dtype=torch.uint8, device=device)
        is_first = rank == link.first
        channel = pair_group(f"{name}/{link}", int(not is_first), device.type, None)
        times = []
        for _ in range(_NUM_WARM_UP + _NUM_REPEATS):
            started = _now(device)
            for sends in (is_first, not is_first):
                work = channel.send([message], int(is_first), 0) if sends else channel.recv([message], int(is_first), 0)
                work.wait()
            times.append((_now(device) - started) / 2)
        channel.shutdown()
        if is_first:
            found[link] = median(times[_NUM_WARM_UP:])
    return found


def measure_gather_and_reduce(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Milliseconds to gather, and to reduce and scatter, ``num_bytes`` of float32 over ``group``.

    Every rank of the group has to call this with the same number.
    """
    size = group.size()
    if num_bytes == 0 or size == 1:
        return 0.0, 0.0
    measured_bytes = min(num_bytes, _MOST_BYTES_MEASURED)
    share = torch.zeros(max(1, measured_bytes // (4 * size)), dtype=torch.float32, device=device)
    whole = torch.zeros(share.numel() * size, dtype=torch.float32, device=device)
    gathers, reductions = [], []
    for _ in range(_NUM_WARM_UP + _NUM_REPEATS):
        started = _now(device)
        dist.all_gather_single(whole, share, group=group)
        gathered = _now(device)
        dist.reduce_scatter_single(share, whole, group=group)
        gathers.append(gathered - started)
        reductions.append(_now(device) - gathered)
    scale = num_bytes / measured_bytes
    return scale * median(gathers[_NUM_WARM_UP:]), scale * median(reductions[_NUM_WARM_UP:])


def measure_host_copies(num_bytes: int, device: torch.device) -> float:
    """Milliseconds to copy ``num_bytes`` of a CUDA device to pinned memory of the host while as many come back."""
    measured_bytes = max(1, min(num_bytes, _MOST_BYTES_MEASURED))
    there, taken = (torch.zeros(measured_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    here, given = (torch.zeros(measured_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    times = []
    for _ in range(_NUM_WARM_UP + _NUM_REPEATS):
        started = _now(device)
        with torch.cuda.stream(beside):
            here.copy_(there, non_blocking=True)
        taken.copy_(given, non_blocking=True)
        times.append(_now(device) - started)
    return num_bytes / measured_bytes * median(times[_NUM_WARM_UP:])


def _now(device: torch.device) -> float:
    """Milliseconds, once the device has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3
