"""The last stage's message to the other ranks of its pipeline in each batch, while all of them continue."""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.distributed.control import (
    FRAME_BYTES,
    ControlGroups,
    frame_of,
    open_frame,
    pickled,
    pickled_error,
    rest_of,
)
from lightning_pp.distributed.watch.this_rank import RankStoppedError

_TAG_RANGE = 1 << 29


class MessageLine:
    """A line from the last stage to each other rank of its pipeline; one message a batch, in order.

    Messages are made, sent and received by a thread of each rank, over groups of their own, point to point, while the
    rank works on. Making a message may use collectives among the last stages of all replicas; these too are this
    thread's alone.

    Args:
        groups: Control groups that no other code uses.
        device: Where this rank works; the thread makes it its own, or what it makes of tensors there would be done on
            the first device of the host.
    """

    def __init__(self, groups: ControlGroups, device: torch.device) -> None:
        self.groups = groups
        self._device = device
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._thread: threading.Thread | None = None
        self._number = 0

    def send(self, produce: Callable[[], Any]) -> Future[Any]:
        """Sends the message of a batch; the last stage calls this once a batch, each other rank :meth:`listen`.

        Args:
            produce: Makes the content, in another thread.

        Returns:
            The content, or what ``produce`` raised, once the others have got the error as well.
        """
        # the list lets go of it once it is done: what it holds would stay until the message has left
        return self._start(_produce_and_send, [produce])

    def listen(self) -> Future[Any]:
        """Receives the message of a batch.

        Returns:
            The content, or the error that making it raised on the last stage, or :class:`RankStoppedError`.
        """
        return self._start(_listen)

    def _start(self, work: Callable[..., None], *args: Any) -> Future[Any]:
        self._number += 1
        return self._queue(work, self.groups, 2 * (self._number % _TAG_RANGE), *args)

    def _queue(self, work: Callable[..., None], *args: Any) -> Future[Any]:
        message: Future[Any] = Future()
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=(self._jobs, self._device), name="pipeline-results", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)  # the thread ends with the line
        self._jobs.put(lambda: work(message, *args))
        return message

    def drain(self) -> None:
        """Waits until all messages so far have left this rank, or arrived on it; no thread is left then."""
        thread = self._thread
        self.close()
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Has the thread end once it has done what it was given."""
        if self._jobs is not None:
            self._jobs.put(None)
        self._jobs = self._thread = None


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (job := jobs.get()) is not None:
        job()
        del job


def _produce_and_send(
    message: Future[Any], groups: ControlGroups, tag: int, production: list[Callable[[], Any]]
) -> None:
    try:
        content = production.pop()()
        payload = pickled((False, content), "What the step returned") if groups.batch is not None else b""
    except Exception as error:
        # first the others, since this rank ends the connections when it hears of the error
        _send(pickled_error(error), groups, tag)
        message.set_exception(error)
        return
    message.set_result(content)
    _send(payload, groups, tag)


def _send(payload: bytes, groups: ControlGroups, tag: int) -> None:
    if groups.batch is None:
        return
    tensors = [frame_of(payload)]
    if missing := len(payload) - len(open_frame(tensors[0])[1]):
        tensors.append(rest_of(payload, missing))
    others = [rank for rank in range(groups.batch.size()) if rank != groups.source]
    # a rank has stopped: what this one does next with it fails as well
    with contextlib.suppress(RuntimeError):
        works = [
            dist.isend(tensor, group=groups.batch, group_dst=rank, tag=tag + part)
            for rank in others
            for part, tensor in enumerate(tensors)
        ]
        for work in works:
            assert work is not None
            work.wait()


def _listen(message: Future[Any], groups: ControlGroups, tag: int) -> None:
    try:
        length, payload = open_frame(_receive(FRAME_BYTES, groups, tag))
        if missing := length - len(payload):
            payload += _receive(missing, groups, tag + 1).numpy().tobytes()
        failed, content = pickle.loads(payload)
    except RuntimeError as error:
        message.set_exception(RankStoppedError(f"The results of a batch did not arrive from the last stage: {error}"))
    except Exception as error:  # whatever unpickling raises
        message.set_exception(error)
    else:
        if failed:
            message.set_exception(content)
        else:
            message.set_result(content)


def _receive(num_bytes: int, groups: ControlGroups, tag: int) -> Tensor:
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    work = dist.irecv(tensor, group=groups.batch, group_src=groups.source, tag=tag)
    assert work is not None
    work.wait()
    return tensor
