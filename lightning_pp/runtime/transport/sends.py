"""Sends under way: each tensor is kept until the other side has it, without waiting for that."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from typing import Any

from torch import Tensor

# From this size on, letting go of a tensor at once is worth a thread's time; below, it is held until the receipt.
_WORTH_WATCHING_BYTES = 1 << 20


class Send:
    """One send.

    Args:
        work: What the backend gave; None for an empty tensor, which is not sent.
        tensor: What is sent.
        is_gradient: Whether it is a gradient, into which no code writes afterwards.
    """

    __slots__ = ("error", "has_left", "is_gradient", "tensor", "work")

    def __init__(self, work: Any, tensor: Tensor, is_gradient: bool) -> None:
        self.work = work
        self.tensor: Tensor | None = tensor
        self.is_gradient = is_gradient
        self.has_left: threading.Event | None = None
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Returns when the tensor has left.

        Raises:
            RuntimeError: It has not, and will not.
        """
        try:
            if self.has_left is not None:
                self.has_left.wait()
                if self.error is not None:
                    raise self.error
            elif self.work is not None:
                self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"A send to another stage failed: {error}") from error

    def wait_on_thread(self) -> None:
        """What the watching thread does: waits, lets go of the tensor, tells."""
        assert self.has_left is not None
        try:
            self.work.wait()
        except BaseException as error:
            self.error = error
        self.work = self.tensor = None  # the work holds the tensor too
        self.has_left.set()


class Sends:
    """The sends of one rank.

    A message that comes back is taken for a receipt: a rank runs its actions in order, and one that has sent the result
    of an action has received whatever it, and any action before it, needed. The route knows how many sends each message
    acknowledges. Over NCCL that holds in the order of the device's work: what is done after the receipt may use the
    memory again. Gloo's works tell that they are done only to who waits; large tensors are watched by a thread
    there, which lets go of them as soon as they have left. Works of other backends are asked besides.

    At the end of a step gradients may still be under way; they stay over the next step, so that no rank waits for the
    others. Values are waited for, since they may lie in the model's own memory, which the optimizer writes into; the
    gradients that came back for them have acknowledged nearly all.

    Args:
        works_tell: Whether ``work.is_completed()`` can be trusted.
    """

    def __init__(self, works_tell: bool) -> None:
        self._works_tell = works_tell
        self._of_step: dict[int, deque[Send]] = {}
        self._num_done: dict[int, int] = {}
        self._of_last_step: dict[int, deque[Send]] = {}
        self._watcher: _Watcher | None = None

    def add(self, receiver: int, send: Send) -> None:
        """Keeps ``send``, the next one to ``receiver``."""
        under_way = self._of_step.get(receiver)
        if under_way is None:
            under_way = self._of_step[receiver] = deque()
            self._num_done[receiver] = 0
        under_way.append(send)
        if self._works_tell:
            self._drop_completed()
        elif send.tensor is not None and send.tensor.nbytes >= _WORTH_WATCHING_BYTES:
            if self._watcher is None:
                self._watcher = _Watcher()
                weakref.finalize(self, self._watcher.close)  # its thread ends with the sends
            self._watcher.watch(send)

    def acknowledge(self, receiver: int, num_sends: int) -> None:
        """``receiver`` is known to have the first ``num_sends`` of this step, and all of the steps before."""
        if self._of_last_step:
            for send in self._of_last_step.pop(receiver, ()):
                self._release(send)
        num_done = self._num_done.get(receiver, 0)
        if num_sends > num_done:
            under_way = self._of_step[receiver]
            for _ in range(num_sends - num_done):
                self._release(under_way.popleft())
            self._num_done[receiver] = num_sends

    def _release(self, send: Send) -> None:
        """NCCL's works hold their tensors until a wait, and the device has waited by now."""
        if self._works_tell:
            send.wait()

    def end_step(self) -> None:
        """Returns when the values of this step and all of the step before have left."""
        earlier, self._of_last_step = self._of_last_step, {}
        for receiver, under_way in self._of_step.items():
            gradients = deque(send for send in under_way if send.is_gradient)
            if gradients:
                self._of_last_step[receiver] = gradients
        values = [send for under_way in self._of_step.values() for send in under_way if not send.is_gradient]
        self._of_step = {}
        for send in (*(send for under_way in earlier.values() for send in under_way), *values):
            send.wait()

    def wait(self) -> None:
        """Returns when everything has left."""
        for send in self.abandon():
            send.wait()

    def abandon(self) -> list[Send]:
        """Forgets everything, and returns what may still be under way."""
        kept = [
            send for sends in (self._of_last_step, self._of_step) for under_way in sends.values() for send in under_way
        ]
        self._of_last_step, self._of_step = {}, {}
        if self._watcher is not None:  # it may wait for ever for one of them
            self._watcher.close()
            self._watcher = None
        return kept

    def _drop_completed(self) -> None:
        for sends in (self._of_last_step, self._of_step):
            for receiver, under_way in sends.items():
                while under_way and (under_way[0].work is None or under_way[0].work.is_completed()):
                    under_way.popleft()
                    if sends is self._of_step:
                        self._num_done[receiver] += 1


class _Watcher:
    """Waits for sends on a thread of its own, one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Send | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="pipeline-sends", daemon=True).start()

    def watch(self, send: Send) -> None:
        """Lets go of the tensor of ``send`` when it has left."""
        send.has_left = threading.Event()
        self._queue.put(send)

    def close(self) -> None:
        """Ends the thread once all that is watched is done."""
        self._queue.put(None)

    def _run(self) -> None:
        while (send := self._queue.get()) is not None:
            send.wait_on_thread()
            del send
