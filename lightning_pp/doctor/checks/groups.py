"""Shared by checks that send messages themselves: the group of all ranks, and channels between neighbours."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_pp.distributed.groups import pair_group, warm_up
from lightning_pp.distributed.loopback import gloo_on_loopback
from lightning_pp.doctor.findings import Rank
from lightning_pp.runtime.transport.channels import opening_order

TIMEOUT = timedelta(seconds=40)


def join(rank: Rank) -> None:
    """Makes the group of all ranks and uses it once, as the strategy does before a training."""
    rank.note("meeting the other ranks")
    backend = dist.get_default_backend_for_device(rank.device)
    with gloo_on_loopback():
        dist.init_process_group(backend, timeout=TIMEOUT)
    rank.note("the first collectives")
    world = dist.group.WORLD
    assert world is not None
    warm_up([world], rank.device)


def open_channels(rank: Rank, name: str, pairs: list[tuple[int, int]]) -> dict[tuple[int, int], Any]:
    """A channel for each (sender, receiver) that this rank is in, opened by a first message.

    Args:
        rank: This one.
        name: Of the channels, used once.
        pairs: The same on all ranks.
    """
    channels = {}
    for pair in opening_order(pairs):
        if rank.rank not in pair:
            continue
        rank.note(f"opening the channel from rank {pair[0]} to rank {pair[1]}")
        channel = pair_group(f"{name}/{pair[0]}-{pair[1]}", pair.index(rank.rank), rank.device.type, TIMEOUT)
        number = torch.zeros(1, device=rank.device)
        (channel.send([number], 1, 0) if rank.rank == pair[0] else channel.recv([number], 0, 0)).wait()
        settle(rank.device)
        channels[pair] = channel
    return channels


def neighbours(num_ranks: int) -> list[tuple[int, int]]:
    """Both directions between each two neighbours of a pipeline."""
    return [pair for first in range(num_ranks - 1) for pair in ((first, first + 1), (first + 1, first))]


def settle(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
