"""The times at which each action of a step waited and worked."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_pp.schedule import Action


@dataclass(frozen=True)
class ActionTimes:
    """One action's times, in milliseconds since the step began on this rank.

    Attributes:
        action: The action.
        asked_ms: When the rank came to the action.
        start_ms: When it had what it needs of other stages.
        end_ms: When it was done.
        early_ms: How long it worked before it needed that.
    """

    action: Action
    asked_ms: float
    start_ms: float
    end_ms: float
    early_ms: float = 0.0

    @property
    def wait_ms(self) -> float:
        """How long the rank waited for other stages."""
        return self.start_ms - self.asked_ms - self.early_ms

    @property
    def work_ms(self) -> float:
        """How long the action took."""
        return self.end_ms - self.start_ms + self.early_ms


class StepTimer:
    """Takes the time of every action: by the host's clock, or by events in the stream of a CUDA device.

    Events cost about a microsecond and are read when the step's times are asked for. Where an action begins when the
    one before has ended they share one.

    Args:
        device: Where the actions work.
        is_on: Whether times are needed; otherwise none is taken.

    Attributes:
        sent_bytes: What each stage of this rank sends to other ranks in the step.
    """

    def __init__(self, device: torch.device, *, is_on: bool = True) -> None:
        self._cuda = device.type == "cuda"
        self._is_on = is_on
        self._now: Callable[[], Any] = partial(moment, device) if is_on else lambda: None
        self._origin: Any = self._now()
        self._begun: Any = self._origin
        self._waiting: Any = self._origin
        self._arrived: Any = self._origin
        self._marks: list[tuple[Action, Any, Any, Any, Any]] = []
        self.sent_bytes: Mapping[int, int] = {}

    def start(self) -> None:
        """The next action is due."""
        now = self._marks[-1][-1] if self._cuda and self._marks else self._now()
        self._begun = self._waiting = self._arrived = now

    def start_waiting(self) -> None:
        """It cannot go on without what other stages send."""
        self._waiting = self._now()

    def stop_waiting(self) -> None:
        """All that it needs is there."""
        self._arrived = self._now()

    def stop(self, action: Action) -> None:
        """It is done."""
        self._marks.append((action, self._begun, self._waiting, self._arrived, self._now()))

    def times(self) -> list[ActionTimes]:
        """The times of all F, I, W and B so far; on CUDA waits for the last of them."""
        return [each for each in self._all_times() if each.action.kind.is_compute]

    def sharding_times(self) -> list[ActionTimes]:
        """The times of all other actions so far: when each was begun, not when its collective or copy ended."""
        return [each for each in self._all_times() if not each.action.kind.is_compute]

    def _all_times(self) -> list[ActionTimes]:
        if not self._is_on:
            raise RuntimeError("This step was not timed, since no times were asked for before it began.")
        times = []
        for action, *moments in self._marks:
            begun, waiting, arrived, ended = map(partial(ms_between, self._origin), moments)
            times.append(ActionTimes(action, begun, arrived, ended, waiting - begun))
        return times


def moment(device: torch.device) -> Any:
    """Now, by the host's clock; on CUDA when the device reaches this point."""
    return _recorded_event() if device.type == "cuda" else time.perf_counter_ns()


def ms_between(first: Any, second: Any) -> float:
    """Milliseconds from one moment to another; waits for the device."""
    if isinstance(first, int):
        return float(second - first) / 1e6
    second.synchronize()
    return float(first.elapsed_time(second))


def _recorded_event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
