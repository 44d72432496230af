"""What a run of the step prints and logs that is not the real one: nothing is seen of it, unless it fails."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class _Held:
    """What one thread has written while it was held, in order."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._is_over = False
        self._written: list[Callable[[], Any]] = []

    def takes(self, write: Callable[[], Any]) -> bool:
        """Keeps a ``write`` of the thread for later; one under a debugger has somebody who waits for it."""
        if self._is_over or threading.get_ident() != self._thread or sys.gettrace() is not None:
            return False
        self._written.append(write)
        return True

    def end(self) -> None:
        self._is_over = True

    def let_out(self) -> None:
        for write in self._written:
            write()


class _HeldStream:
    """Stands for ``sys.stdout`` or ``sys.stderr``, also for who keeps it longer than anything is held."""

    def __init__(self, stream: Any, held: _Held) -> None:
        self._stream, self._held = stream, held

    def write(self, text: str) -> int:
        # Python shows a warning once for each line, so it is not shown again by the real run
        caller = getattr(inspect.currentframe(), "f_back", None)
        is_warning = caller is not None and "warnings" in caller.f_globals.get("__name__", "")
        if not is_warning and self._held.takes(partial(self._stream.write, text)):
            return len(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def output_held() -> Iterator[None]:
    """Within, nothing is seen of what this thread prints to ``sys.stdout`` and ``sys.stderr`` and gives to ``logging``.

    It is dropped at the end, since a step that is run for real prints it; an exception that leaves the block lets it
    out. Warnings, other threads and code under a debugger are not held.
    """
    held = _Held()
    stdout, stderr, handle = sys.stdout, sys.stderr, logging.Logger.handle

    def take(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not held.takes(partial(handle, logger, record)):
            handle(logger, record)

    sys.stdout, sys.stderr = _HeldStream(stdout, held), _HeldStream(stderr, held)
    logging.Logger.handle = take  # type: ignore[method-assign, assignment]
    fails = False
    try:
        yield
    except (Exception, KeyboardInterrupt):  # other exceptions end a step that has come far enough
        fails = True
        raise
    finally:
        held.end()
        sys.stdout, sys.stderr = stdout, stderr
        logging.Logger.handle = handle  # type: ignore[method-assign]
        if fails:
            held.let_out()
