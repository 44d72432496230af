"""Channels that know no tags and connect at their first message, as NCCL's do, made of gloo's.

Both sides of the first message wait on the host until the other has come to it, tags are left out, and each direction
of each pair of ranks has a group of its own. Sends and posted receives occupy the device, as large messages do: at
every action the rank drains it, as loading a kernel or freeing memory does, and waits until all that it has posted is
there, and until receives are posted for all that it has sent. Gloo's sends end no earlier, whatever their size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Stop
from lightning_pp.split.record.step_record import Value


class ConnectingChannel:
    """A group of two whose first message waits for the other side, on the host."""

    patience_s = 60.0

    def __init__(self, group: dist.ProcessGroup, key: str) -> None:
        self._group = group
        self._key = key
        self._is_connected = False

    def _connect(self, tensors: list[Tensor], tag: int) -> None:
        assert tag == 0 and tensors[0].dtype != torch.int16 and not tensors[0].is_complex()
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
        self._connect(tensors, tag)
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._connect(tensors, tag)
        return self._group.recv(tensors, peer, tag)

    def abort(self) -> None:
        self._group.abort()

    def shutdown(self) -> None:
        self._group.shutdown()


class ChannelTransport(Transport):
    """The transport as it is over NCCL."""

    made = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(self.made)
        super().__init__(*args, **kwargs, matches_by_tag=False)

    def _new_channel(self, channel: tuple[int, int]) -> Any:
        ranks = tuple(self._ranks[place] for place in channel)
        return ConnectingChannel(super()._new_channel(channel), f"{self._number}: {ranks}")

    patience_s = 60.0

    def post(self, stop: Stop) -> None:
        super().post(stop)
        self._drain_device()

    def receive(self, stop: Stop) -> list[tuple[Value, Tensor]]:
        received = super().receive(stop)
        self._drain_device()
        return received

    def _drain_device(self) -> None:
        """Gloo's works are waited for once."""
        patience = timedelta(seconds=self.patience_s)
        for tag, (work, tensor) in self._posted.items():
            if work is not None:
                work.wait(patience)
                self._posted[tag] = (None, tensor)
        for sends in (self._sends._of_last_step, self._sends._of_step):
            for send in itertools.chain(*sends.values()):
                if send.work is not None:
                    send.work.wait(patience)
                    send.work = None


class EagerTransport(ChannelTransport):
    """The same, with receives posted as where they occupy nothing."""

    patience_s = 3.0
    matches_by_tag = True


@contextmanager
def channels_of(kind: type[ChannelTransport]) -> Iterator[None]:
    ChannelTransport.made = itertools.count()  # workers are used again
    with patch("lightning_pp.strategy.connection.Transport", kind):
        yield
