"""A signal that ends a run acts at the next batch; if no batch begins in time, the process ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection

_POLL_S = 0.2
_watching: list[int] = []  # the process that writes signals into a pipe, if it does


def _forget_in_child() -> None:
    """A forked process (a loader's worker) would write its signals into its parent's pipe."""
    if _watching:
        _watching.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


class SignalDeadline:
    """Calls ``end`` if no batch begins within ``seconds`` of a signal, or of the last batch that has begun since.

    Python runs a signal's handler in the main thread, between two of its lines, and that thread may wait in a
    collective for ever. The number of a signal is written into a pipe at once, and a thread reads it there.

    Args:
        seconds: How long a batch may take to begin.
        num_batches: Batches that this rank has begun.
        end: Ends the process.
    """

    def __init__(self, seconds: float, num_batches: Callable[[], int], end: Callable[[signal.Signals], None]) -> None:
        self._seconds = seconds
        self._num_batches = num_batches
        self._end = end
        self._done = threading.Event()
        self._pipe: tuple[int, int] | None = None
        self._former = -1
        self._thread: threading.Thread | None = None

    def start(self, signals: Collection[int]) -> None:
        """Watches for ``signals``, whose handlers are in place; nothing outside of the main thread, which has none."""
        if threading.current_thread() is not threading.main_thread() or self._pipe is not None:
            return
        self._pipe = os.pipe()
        for descriptor in self._pipe:
            os.set_blocking(descriptor, descriptor == self._pipe[0])
        self._former = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        _watching.append(os.getpid())
        self._thread = threading.Thread(target=self._watch, args=(signals,), name="pipeline-signals", daemon=True)
        self._thread.start()

    def reached(self) -> None:
        """The run ends here in order, however long a save takes."""
        self._done.set()

    def stop(self) -> None:
        """The run has ended; what has read signals before does so again."""
        self._done.set()
        if self._pipe is None or self._thread is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._former)
            _watching.clear()
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for descriptor in self._pipe:
            os.close(descriptor)
        self._pipe = self._thread = None

    def _watch(self, signals: Collection[int]) -> None:
        assert self._pipe is not None
        while 0 not in (numbers := os.read(self._pipe[0], 64)):
            if self._former >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._former, numbers)
            if found := [number for number in numbers if number in signals]:
                self._count_down(signal.Signals(found[0]))

    def _count_down(self, number: signal.Signals) -> None:
        begun, since = self._num_batches(), time.monotonic()
        while not self._done.wait(_POLL_S):
            if (now := self._num_batches()) != begun:
                begun, since = now, time.monotonic()
            if time.monotonic() - since > self._seconds:
                self._end(number)
