"""Holds back what a trial run of the step prints and logs, unless the run fails."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class _HeldStream:
    """Stands for ``sys.stdout`` or ``sys.stderr``, also for code that keeps it for longer."""

    def __init__(self, stream: Any, takes: Callable[[Callable[[], Any]], bool]) -> None:
        self._stream, self._takes = stream, takes

    def write(self, text: str) -> int:
        # Python shows a warning once for each line, so it is not shown again by the real run
        caller = getattr(inspect.currentframe(), "f_back", None)
        is_warning = caller is not None and "warnings" in caller.f_globals.get("__name__", "")
        if not is_warning and self._takes(partial(self._stream.write, text)):
            return len(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def output_held() -> Iterator[None]:
    """In the block, output of this thread to ``sys.stdout``, ``sys.stderr`` and ``logging`` is held back.

    It is dropped at the end, since a step that is run for real prints it; an exception that leaves the block lets it
    out. Warnings, other threads and code under a debugger are not held.
    """
    thread, is_over = threading.get_ident(), False
    written: list[Callable[[], Any]] = []
    stdout, stderr, handle = sys.stdout, sys.stderr, logging.Logger.handle

    def takes(write: Callable[[], Any]) -> bool:
        if is_over or threading.get_ident() != thread or sys.gettrace() is not None:
            return False
        written.append(write)
        return True

    def take(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not takes(partial(handle, logger, record)):
            handle(logger, record)

    sys.stdout, sys.stderr = _HeldStream(stdout, takes), _HeldStream(stderr, takes)
    logging.Logger.handle = take  # type: ignore[method-assign, assignment]
    fails = False
    try:
        yield
    except (Exception, KeyboardInterrupt):  # other exceptions end a step that has come far enough
        fails = True
        raise
    finally:
        is_over = True
        sys.stdout, sys.stderr = stdout, stderr
        logging.Logger.handle = handle  # type: ignore[method-assign]
        for write in written if fails else ():
            write()
