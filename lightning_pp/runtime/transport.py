"""Moving tensors between the stages of one pipeline."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.schedule import Action, ActionKind, Schedule
from lightning_pp.split.plan import StepPlan
from lightning_pp.split.record import TensorSpec, Value

# how many messages beyond the next one a rank has posted a receive for, on each channel
_RECEIVES_AHEAD = 2
_TAG_RANGE = 1 << 30
_TAGS_PER_STEP = 1 << 19


@dataclass(frozen=True)
class Message:
    """One tensor on its way: the value of an edge forward, or its gradient back.

    Attributes:
        tag: Distinguishes it from all others of the step.
        value: Which unit output it is, or is the gradient of.
        spec: Its shape and dtype.
        sender: The pipeline rank that it leaves.
        receiver: The pipeline rank that it goes to; may be the same.
    """

    tag: int
    value: Value
    spec: TensorSpec
    sender: int
    receiver: int


@dataclass(frozen=True)
class Route:
    """Everything that one rank sends and receives in one step, in the order in which it happens.

    Attributes:
        incoming: For each other pipeline rank, its messages to this one in the order in which it sends them. Backends
            that match by order (NCCL) need receives posted in just that order.
        arrivals: For each action of this rank, the messages that it waits for.
        departures: For each action of this rank, the messages that it sends.
    """

    incoming: dict[int, tuple[Message, ...]]
    arrivals: dict[Action, tuple[Message, ...]]
    departures: dict[Action, tuple[Message, ...]]


def plan_route(schedule: Schedule, plans: Sequence[StepPlan], rank: int) -> Route:
    """Derives from the programs of all ranks what ``rank`` sends and receives."""
    rank_of_stage = schedule.placement.rank_of_stage
    numbers = [{edge: number for number, edge in enumerate(plan.edges)} for plan in plans]
    most_edges = max(len(plan.edges) for plan in plans)

    def messages(action: Action, *, sent: bool) -> Iterator[Message]:
        microbatch = action.microbatch
        if microbatch is None or action.kind is ActionKind.W:
            return
        stage = plans[microbatch].stages[action.stage]
        is_gradient = action.kind is not ActionKind.F
        # a forward receives and then sends values; a backward receives gradients of what was sent, and so on
        for edge in stage.sends if sent is not is_gradient else stage.receives:
            if edge.has_gradient or not is_gradient:
                tag = 2 * (microbatch * most_edges + numbers[microbatch][edge]) + is_gradient
                source, target = rank_of_stage[edge.source], rank_of_stage[edge.target]
                sender, receiver = (target, source) if is_gradient else (source, target)
                yield Message(tag, edge.value, edge.spec, sender, receiver)

    incoming: dict[int, list[Message]] = {}
    for sender, program in enumerate(schedule.programs):
        if sender == rank:
            continue
        for action in program:
            for message in messages(action, sent=True):
                if message.receiver == rank:
                    incoming.setdefault(sender, []).append(message)
    own = schedule.programs[rank]
    return Route(
        {sender: tuple(ordered) for sender, ordered in incoming.items()},
        {action: tuple(messages(action, sent=False)) for action in own},
        {action: tuple(messages(action, sent=True)) for action in own},
    )


class Transport:
    """Sends and receives of one rank of one pipeline.

    Receives are posted ahead of need. A send keeps its tensor until the backend is done with it and then lets go; the
    caller keeps nothing. Between two stages on one rank tensors are handed over as they are.

    Args:
        ranks: Global ranks of the pipeline, in pipeline order.
        rank: This rank's place in ``ranks``.
        device: Where received tensors are put.
        timeout: How long a receive may wait.
    """

    def __init__(self, ranks: Sequence[int], rank: int, device: torch.device, timeout: timedelta | None = None) -> None:
        self._ranks = tuple(ranks)
        self._rank = rank
        self._device = device
        self._matches_by_tag = device.type == "cpu"
        self._groups = {} if self._matches_by_tag else self._channel_groups(timeout)
        self._step = 0
        self._route: Route | None = None
        self._waiting: dict[int, deque[Message]] = {}
        self._num_posted: dict[int, int] = {}
        self._posted: dict[int, tuple[Any, Tensor]] = {}
        self._handed_over: dict[int, Tensor] = {}
        self._reaper = self._new_reaper() if self._matches_by_tag else None
        self._sending: deque[tuple[Any, Tensor]] = deque()
        self._abandoned: list[tuple[Any, Tensor]] = []

    def _new_reaper(self) -> _Reaper:
        reaper = _Reaper()
        weakref.finalize(self, reaper.close)  # its thread ends with the transport
        return reaper

    def _channel_groups(self, timeout: timedelta | None) -> dict[tuple[int, int], dist.ProcessGroup]:
        """A group per direction and pair: on a shared one NCCL would run sends and receives one after the other."""
        groups = {}
        for source in range(len(self._ranks)):
            for target in range(len(self._ranks)):
                if source != target and self._rank in (source, target):
                    members = [self._ranks[source], self._ranks[target]]
                    groups[source, target] = dist.new_group(
                        members,
                        timeout=timeout,
                        use_local_synchronization=True,
                        group_desc=f"pipeline {source}->{target}",
                    )
        return groups

    def begin(self, route: Route) -> None:
        """Starts a step; posts the first receives."""
        self._route = route
        self._step += 1
        self._waiting = {sender: deque(messages) for sender, messages in route.incoming.items()}
        self._num_posted = dict.fromkeys(self._waiting, 0)
        for sender in self._waiting:
            self._post_ahead(sender)

    def receive(self, action: Action) -> list[tuple[Value, Tensor]]:
        """Waits for everything that ``action`` needs."""
        assert self._route is not None
        received = []
        for message in self._route.arrivals[action]:
            if message.sender == self._rank:
                received.append((message.value, self._handed_over.pop(message.tag)))
                continue
            while message.tag not in self._posted:
                self._post(message.sender)
            work, tensor = self._posted.pop(message.tag)
            self._num_posted[message.sender] -= 1
            self._post_ahead(message.sender)
            if work is not None:
                self._wait(work, message, action)
            received.append((message.value, tensor))
        return received

    def _wait(self, work: Any, message: Message, action: Action) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"Pipeline rank {self._rank} waited for pipeline rank {message.sender} (global rank "
                f"{self._ranks[message.sender]}) to send what {action} needs, and that rank has stopped; look for its "
                f"own error, which came first. ({error})"
            ) from error

    def send(self, action: Action, tensors: Mapping[Value, Tensor]) -> None:
        """Sends what ``action`` has to send, without waiting for it to arrive."""
        assert self._route is not None
        if self._reaper is not None:
            self._reaper.check()
        for message in self._route.departures[action]:
            tensor = tensors[message.value].detach()
            if message.receiver == self._rank:
                self._handed_over[message.tag] = tensor
            elif tensor.numel() > 0:
                tensor = tensor.contiguous()
                group = self._groups.get((self._rank, message.receiver))
                work = dist.isend(tensor, self._ranks[message.receiver], group=group, tag=self._tag(message))
                if self._reaper is not None:
                    self._reaper.watch(work, tensor)
                else:
                    self._sending.append((work, tensor))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def finish(self) -> None:
        """Ends a step; everything that was sent has left."""
        if self._reaper is not None:
            self._reaper.drain()
        while self._sending:
            self._sending.popleft()[0].wait()
        self._route = None

    def abandon(self) -> None:
        """Forgets a step that failed. Its messages carry the step's number, so a later step cannot mistake them.

        What is still under way keeps its memory: the other side may complete it yet, or never.
        """
        self._route = None
        self._abandoned += [*self._posted.values(), *self._sending]
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = self._new_reaper()
        self._waiting.clear()
        self._posted.clear()
        self._handed_over.clear()
        self._sending.clear()

    def _post_ahead(self, sender: int) -> None:
        while self._num_posted[sender] < _RECEIVES_AHEAD and self._waiting[sender]:
            self._post(sender)

    def _post(self, sender: int) -> None:
        message = self._waiting[sender].popleft()
        tensor = torch.empty(message.spec.shape, dtype=message.spec.dtype, device=self._device)
        work = None
        if tensor.numel() > 0:
            group = self._groups.get((sender, self._rank))
            work = dist.irecv(tensor, self._ranks[sender], group=group, tag=self._tag(message))
        self._posted[message.tag] = (work, tensor)
        self._num_posted[sender] += 1

    def _tag(self, message: Message) -> int:
        return (self._step * _TAGS_PER_STEP + message.tag) % _TAG_RANGE if self._matches_by_tag else 0


class _Reaper:
    """Waits for gloo's sends on a thread of its own.

    Their completion shows in ``wait`` only, and until then the tensor must live.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, Tensor] | threading.Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="pipeline-sends", daemon=True).start()

    def watch(self, work: Any, tensor: Tensor) -> None:
        """Keeps ``tensor`` until ``work`` is done."""
        self._queue.put((work, tensor))

    def drain(self) -> None:
        """Returns when all that is watched is done; raises what a send raised."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        self.check()

    def close(self) -> None:
        """Ends the thread once all that is watched is done."""
        self._queue.put(None)

    def check(self) -> None:
        """Raises what a send raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"A send to another stage failed: {error}") from error

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                item[0].wait()
            except BaseException as error:
                self._error = error
            del item
