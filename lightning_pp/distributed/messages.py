"""What the last stage tells the other ranks of its pipeline after each training batch, with nobody waiting for it."""

from __future__ import annotations

import pickle
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.distributed.control import ControlGroups, pickled, pickled_error

_FRAME_BYTES = 4096
_LENGTH_BYTES = 8
_TAG_RANGE = 1 << 29


class Message:
    """What one batch came to; it arrives some time after the batch."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._content: Any = None
        self._error: BaseException | None = None

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` returns, or raises, at once."""
        return self._arrived.is_set()

    def has_failed(self) -> bool:
        """Whether :meth:`wait` raises at once."""
        return self._error is not None

    def wait(self) -> Any:
        """The content; raises what making it raised on the last stage, or what the connection broke with."""
        self._arrived.wait()
        if self._error is not None:
            raise self._error
        return self._content

    def arrive(self, content: Any) -> None:
        """Sets the content."""
        self._content = content
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Sets the error."""
        self._error = error
        self._arrived.set()


class MessageLine:
    """A line from the last stage to each other rank of its pipeline; one message a batch, in order.

    Messages are made, sent and received by a thread of each rank, over groups of their own, point to point: a rank
    learns of a batch when the last stage is done with it, and goes on meanwhile. Making a message may use collectives
    among the last stages of all replicas; these too are this thread's alone.

    Args:
        groups: Control groups that nobody else uses.
    """

    def __init__(self, groups: ControlGroups) -> None:
        self.groups = groups
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._number = 0

    def next(self, produce: Callable[[], Any]) -> Message:
        """The message of the next batch; every rank of the pipeline calls this once a batch.

        Args:
            produce: Makes the content, on the last stage only and in another thread.
        """
        message = Message()
        self._number += 1
        if self.groups.pipeline_size == 1 and self.groups.num_replicas == 1:
            message.arrive(produce())
            return message
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name="pipeline-results", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)  # the thread ends with the line
        groups, tag = self.groups, 2 * (self._number % _TAG_RANGE)
        if groups.is_last_stage:
            self._jobs.put(lambda: _tell(groups, tag, produce, message))
        else:
            self._jobs.put(lambda: _listen(groups, tag, message))
        return message

    def drain(self) -> None:
        """Waits until all messages so far have left this rank, or arrived on it."""
        if self._jobs is not None:
            done = threading.Event()
            self._jobs.put(done.set)
            done.wait()


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _tell(groups: ControlGroups, tag: int, produce: Callable[[], Any], message: Message) -> None:
    try:
        content = produce()
        payload = pickled((False, content), "What the step returned") if groups.pipeline_size > 1 else b""
    except Exception as error:
        payload = pickled_error(error)
        message.fail(error)
    else:
        message.arrive(content)
    if groups.pipeline is None:
        return
    head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[: _FRAME_BYTES - _LENGTH_BYTES]
    tensors = [_bytes(head.ljust(_FRAME_BYTES, b"\0"))]
    if rest := payload[_FRAME_BYTES - _LENGTH_BYTES :]:
        tensors.append(_bytes(rest))
    others = [rank for rank in range(groups.pipeline_size) if rank != groups.last_stage_rank]
    try:
        works = [
            dist.isend(tensor, group=groups.pipeline, group_dst=rank, tag=tag + part)
            for rank in others
            for part, tensor in enumerate(tensors)
        ]
        for work in works:
            assert work is not None
            work.wait()
    except RuntimeError as error:  # a rank has stopped: what this one does next with it fails as well
        if not message.has_failed():
            message.fail(_stopped(error))


def _listen(groups: ControlGroups, tag: int, message: Message) -> None:
    try:
        frame = _receive(_FRAME_BYTES, groups, tag)
        length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
        payload = frame[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if missing := length - len(payload):
            payload += _receive(missing, groups, tag + 1)
        failed, content = pickle.loads(payload)
    except RuntimeError as error:
        message.fail(_stopped(error))
    except Exception as error:  # whatever unpickling raises
        message.fail(error)
    else:
        if failed:
            message.fail(content)
        else:
            message.arrive(content)


def _receive(num_bytes: int, groups: ControlGroups, tag: int) -> bytes:
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    work = dist.irecv(tensor, group=groups.pipeline, group_src=groups.last_stage_rank, tag=tag)
    assert work is not None
    work.wait()
    return tensor.numpy().tobytes()


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _stopped(error: Exception) -> RuntimeError:
    return RuntimeError(
        "What a batch came to could not be passed on, because another rank of the pipeline has stopped; look for its "
        f"own error, which came first. ({error})"
    )
