"""Faults that the doctor has to find: each is planted in the processes of one check, in the thing that it looks at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pp import PipelineParallelStrategy
from lightning_pp.distributed.groups import group_of_two
from lightning_pp.doctor.checks import groups
from lightning_pp.planning.memory.limit import Need
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.strategy.connection import Connection
from lightning_pp.strategy.faults.failed_run import FailedRuns
from lightning_pp.strategy.parameters.gradients import StageGradients


class Channel:
    """A channel of which one end does something to what it sends."""

    def __init__(self, channel: Any, send: Callable[..., Any]) -> None:
        self.channel, self.send_by = channel, send
        self.recv, self.shutdown = channel.recv, channel.shutdown

    def send(self, tensors: list[Tensor], *args: int) -> Any:
        return self.send_by(self.channel, tensors, *args)


def channels_send_by(send: Callable[..., Any]) -> None:
    groups.group_of_two = lambda *args: Channel(group_of_two(*args), send)


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


def zeros_in_place_of(num_sends: int) -> None:
    sends, number = Transport.send, 0

    def send(transport: Transport, stop: Any, tensors: Mapping[Any, Tensor]) -> None:
        nonlocal number
        number += 1
        if number == num_sends:
            tensors = {value: torch.zeros_like(tensor) for value, tensor in tensors.items()}
        sends(transport, stop, tensors)

    Transport.send = send  # type: ignore[method-assign]


def wrong_gradients() -> None:
    sends = Transport.send

    def send(transport: Transport, stop: Any, tensors: Mapping[Any, Tensor]) -> None:
        larger = any(message.is_gradient for message in stop.departures)
        sends(transport, stop, {value: 1.05 * t if larger else t for value, t in tensors.items()})

    Transport.send = send  # type: ignore[method-assign]


def generators_apart() -> None:
    Connection.align_generators = lambda connection: None  # type: ignore[method-assign]


def host_that_waits() -> None:
    finish = Transport.finish

    def waiting(transport: Transport) -> None:
        finish(transport)
        float(torch.ones(1)) + torch.ones(1).item()

    Transport.finish = waiting  # type: ignore[method-assign]


def half_the_estimate() -> None:
    whole = Need.peak_bytes.fget  # type: ignore[attr-defined]
    Need.peak_bytes = property(lambda need: whole(need) / 2)  # type: ignore[assignment]


def no_clipping() -> None:
    StageGradients.clip_by_norm = lambda *_, **__: torch.zeros(())  # type: ignore[method-assign]


def forgotten_states() -> None:
    loads = Optimizer.load_state_dict
    Optimizer.load_state_dict = lambda self, state: loads(self, {**state, "state": {}})  # type: ignore[method-assign]


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
    "rounds": lambda: zeros_in_place_of(57),
    "parity": wrong_gradients,
    "generators": generators_apart,
    "host-waits": host_that_waits,
    "memory": half_the_estimate,
    "updates": no_clipping,
    "failures (an exception)": no_names,
}
# other faults of the same checks, and those that keep ranks waiting
MORE_FAULTS: dict[str, Callable[[], None]] = {
    "queued-receives": lost_message,
    "updates": forgotten_states,
    "failures (SIGKILL)": no_end,
    "failures (out of memory)": no_notice,
}


def plant(title: str) -> None:
    FAULTS.get(title, int)()


def plant_more(title: str) -> None:
    MORE_FAULTS[title]()
