"""A pipeline over channels that know no tags and connect at their first message trains like any other.

So does NCCL, which needs a device for each rank. Here such channels are made of gloo's: both sides of the first message
wait on the host until the other has come to it, tags are left out, and each direction of each pair of ranks has a group
of its own.
"""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from parity_run import Layout, Outcome, Settings, check_like_one_device, train_pipelined
from pool import WorkerPool
from torch import Tensor

from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Route


class ConnectingChannel:
    """A group of two whose first message waits for the other side, on the host."""

    patience_s = 60.0

    def __init__(self, group: dist.ProcessGroup, key: str) -> None:
        self._group = group
        self._key = key
        self._is_connected = False

    def _connect(self, tag: int) -> None:
        assert tag == 0
        if self._is_connected:
            return
        store = dist.distributed_c10d._get_default_store()
        store.add(self._key, 1)
        deadline = time.monotonic() + self.patience_s
        while store.add(self._key, 0) < 2:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody came to the first message of {self._key}")
            time.sleep(0.001)
        self._is_connected = True

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._connect(tag)
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._connect(tag)
        return self._group.recv(tensors, peer, tag)


class ChannelTransport(Transport):
    """The transport as it is over NCCL."""

    made = itertools.count()

    def __init__(self, *args: Any) -> None:
        self._number = next(self.made)
        super().__init__(*args, matches_by_tag=False)

    def _channel_groups(self, timeout: timedelta | None) -> dict[tuple[int, int], Any]:
        groups = super()._channel_groups(timeout)
        return {channel: ConnectingChannel(group, f"{self._number}: {channel}") for channel, group in groups.items()}


class UnopenedTransport(ChannelTransport):
    """The same, where the first message of a channel is whatever comes first."""

    def _open_channels_of(self, route: Route) -> None:
        pass


def train_over_channels(opens: bool, settings: Settings, layout: Layout) -> Outcome:
    """In a worker: trains over such a transport."""
    ChannelTransport.made = itertools.count()  # workers are used again
    with (
        patch("lightning_pp.strategy.connection.Transport", ChannelTransport if opens else UnopenedTransport),
        patch.object(ConnectingChannel, "patience_s", 60.0 if opens else 3.0),
    ):
        return train_pipelined(settings, layout)


LAYOUTS: list[Any] = [
    ("residual_mlp", Layout("1f1b", 2, 1, 3)),
    ("residual_mlp", Layout("zb_h1", 2, 2, 3)),
    ("residual_mlp", Layout("auto", 3, 1, 4)),  # searches again between two steps
    ("unet", Layout("zb_v", 2, 1, 4)),
    ("t5", Layout("v_half", 3, 1, 4)),
]
LAYOUTS += [
    pytest.param(*case, marks=pytest.mark.nightly)
    for case in (
        ("residual_mlp", Layout("interleaved_1f1b", 2, 1, 3)),
        ("unet", Layout("zb_h1", 4, 1, 3)),
        ("t5", Layout("dualpipe_v", 2, 1, 4)),
    )
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_training_is_that_of_one_device(pool: WorkerPool, model: str, layout: Layout) -> None:
    settings = Settings(model, accumulate=2, clip_val=0.05, clip_algorithm="norm")
    outcomes = pool.run(train_over_channels, True, settings, layout, world_size=layout.world_size, timeout=120)
    check_like_one_device(outcomes, settings, layout)


def test_channels_that_nobody_opens_hang(pool: WorkerPool) -> None:
    settings, layout = Settings("residual_mlp"), Layout("1f1b", 2, 1, 3)
    report = pool.run(
        train_over_channels, False, settings, layout, world_size=layout.world_size, grace=2, expect_failure=True
    )
    assert any(failure and "nobody came to the first message" in str(failure) for failure in report.failures)
