"""Writing a checkpoint while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_pp.checkpoint.ownership.ranks import fail_together


class BackgroundSaver:
    """Runs one save at a time in a thread.

    ::

        save(write):     wait for the save before; start ``write`` in a thread
        then(action):    when the save is in its place, or now if none is under way
        wait():          until the save is in its place; raises what it or an action of any rank raised

    An action depends on the save: what it replaces is removed only when it is there, and stays if it fails. All ranks
    call :meth:`save` and :meth:`wait` alike, and any of them :meth:`then`.

    Args:
        group: All ranks, and used by no other code: collectives of two threads over one group would mix.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._actions: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._error_of_action: Exception | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether there is a save that has not been waited for; the same on all ranks."""
        return self._thread is not None

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

    def wait(self) -> None:
        """Wait for the save that is under way, if any. Collective over all ranks.

        Raises:
            CheckpointError: On all ranks: it failed, or an action after it did on one of them.
        """
        if self._thread is None:
            return
        actions = self._join()
        with fail_together(self.group):
            self._act(actions)

    def wait_alone(self) -> None:
        """Wait without the other ranks, which may have failed.

        Raises:
            CheckpointError: The save failed, or an action of this rank after it.
        """
        if self._thread is not None:
            self._act(self._join())

    def _join(self) -> list[Callable[[], None]]:
        """Waits for the thread; returns what it has left to do."""
        assert self._thread is not None
        self._thread.join()
        with self._lock:
            actions, self._actions, self._thread = self._actions, [], None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return actions

    def _act(self, actions: list[Callable[[], None]]) -> None:
        error, self._error_of_action = self._error_of_action, None
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
                try:
                    action()
                except Exception as error:  # raised by wait(), on all ranks
                    self._error_of_action = self._error_of_action or error
        except BaseException as error:  # raised by wait(), in the thread that asked for the save
            self._error = error
            with self._lock:
                self._actions.clear()
