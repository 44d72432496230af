"""Writing a checkpoint while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_pp.errors import CheckpointError


class BackgroundSaver:
    """Runs one save at a time in a thread.

    ::

        save(write):     wait for the save before; start ``write`` in a thread
        then(action):    when the save is in its place, or now if none is under way
        wait():          until the save is in its place; raises what it raised

    An action depends on the save: what it replaces is removed only when it is there, and stays if it fails. All ranks
    call :meth:`save` and :meth:`wait` alike.

    Args:
        group: All ranks, and used by nobody else: collectives of two threads over one group would mix.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._actions: list[Callable[[], None]] = []
        self._error: BaseException | None = None

    def save(self, write: Callable[[dist.ProcessGroup | None], None]) -> None:
        """Start a save.

        Args:
            write: Writes it; gets the group. Nothing that it reads may change meanwhile.

        Raises:
            CheckpointError: The save before failed.
        """
        self.wait()
        # a daemon, since a rank whose peers are gone must be able to exit
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` once the save that is under way is in its place; not at all if that fails."""
        with self._lock:
            if self._thread is not None:
                self._actions.append(action)
                return
        action()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the save that is under way, if any.

        Raises:
            CheckpointError: It failed, or is not done after ``timeout_s``.
        """
        thread = self._thread
        if thread is None:
            return
        thread.join(timeout_s)
        if thread.is_alive():
            raise CheckpointError(f"a checkpoint is still being written after {timeout_s} s; it is given up")
        with self._lock:
            actions, self._actions, self._thread = self._actions, [], None
        error, self._error = self._error, None
        if error is not None:
            raise error
        for action in actions:
            action()

    def _run(self, write: Callable[[dist.ProcessGroup | None], None]) -> None:
        try:
            write(self.group)
            while True:
                with self._lock:
                    if not self._actions:
                        return
                    action = self._actions.pop(0)
                action()
        except BaseException as error:  # raised by wait(), in the thread that asked for the save
            self._error = error
            with self._lock:
                self._actions.clear()
