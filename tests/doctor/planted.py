"""Faults that the doctor has to find: each is planted in the processes of one check, in the thing that it looks at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_pp import PipelineParallelStrategy
from lightning_pp.distributed.groups import pair_group
from lightning_pp.doctor.checks import groups
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.strategy.faults.failed_run import FailedRuns


class Channel:
    """A channel of which one end does something to what it sends."""

    def __init__(self, channel: Any, send: Callable[..., Any]) -> None:
        self.channel, self.send_by = channel, send
        self.recv, self.shutdown = channel.recv, channel.shutdown

    def send(self, tensors: list[Tensor], *args: int) -> Any:
        return self.send_by(self.channel, tensors, *args)


def channels_send_by(send: Callable[..., Any]) -> None:
    groups.pair_group = lambda *args: Channel(pair_group(*args), send)


def old_torch() -> None:
    if os.environ["RANK"] == "1":
        torch.__version__ = "2.9.1+cu126"


def damaged_messages() -> None:
    def send(channel: Any, tensors: list[Tensor], *args: int) -> Any:
        (tensor,) = tensors
        damaged = tensor.clone()
        damaged[-1] += int(tensor.numel() > 1)
        return channel.send([damaged], *args)

    channels_send_by(send)


def lost_message() -> None:
    number = 0

    def send(channel: Any, tensors: list[Tensor], *args: int) -> Any:
        nonlocal number
        number += 1
        if os.environ["RANK"] == "1" and number == 7:
            return Done()
        return channel.send(tensors, *args)

    channels_send_by(send)


class Done:
    def wait(self) -> None:
        pass


def wrong_gradients() -> None:
    sends = Transport.send

    def send(transport: Transport, stop: Any, tensors: Mapping[Any, Tensor]) -> None:
        larger = any(message.is_gradient for message in stop.departures)
        sends(transport, stop, {value: 1.05 * t if larger else t for value, t in tensors.items()})

    Transport.send = send  # type: ignore[method-assign]


def no_names() -> None:
    def ends(strategy: Any, error: BaseException) -> None:
        error.args = ("a peer has gone",)
        os._exit(3)

    if os.environ["RANK"] == "0":
        PipelineParallelStrategy.on_exception = ends  # type: ignore[method-assign]


def no_end() -> None:
    FailedRuns.start = lambda *_, **__: None  # type: ignore[method-assign]  # it would end the process after 6 s
    if os.environ["RANK"] == "0":
        PipelineParallelStrategy.on_exception = lambda *_: time.sleep(1000)  # type: ignore[method-assign]


def no_notice() -> None:
    fit = pl.Trainer.fit

    def unmoved(*args: Any, **kwargs: Any) -> None:
        try:
            fit(*args, **kwargs)
        except RuntimeError:
            if os.environ["RANK"] != "0":
                raise

    pl.Trainer.fit = unmoved  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "environment": old_torch,
    "channels": damaged_messages,
    "parity": wrong_gradients,
    "failures (an exception)": no_names,
}
# other faults of the same checks, and those that keep ranks waiting
MORE_FAULTS: dict[str, Callable[[], None]] = {
    "queued-receives": lost_message,
    "failures (SIGKILL)": no_end,
    "failures (out of memory)": no_notice,
}


def plant(title: str) -> None:
    FAULTS.get(title, int)()


def plant_more(title: str) -> None:
    MORE_FAULTS[title]()
