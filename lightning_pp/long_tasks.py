"""Messages about tasks that take long, while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

FIRST_AFTER_S = 5.0
THEN_EVERY_S = 20.0


class LongTask:
    """A context that says after some seconds what runs and for how long, and then at the end how long it took.

    A task that ends before prints nothing. Lines come from a thread of their own, so ``tell`` has to be one that any
    thread may call, as a logger's methods are.

    Args:
        what: What is being done, as the beginning of a sentence.
        tell: Gets each line; None to print nothing, as on all ranks but one.
        first_after_s: When the first line is printed, seconds.
        then_every_s: The time between lines, seconds.
    """

    def __init__(
        self,
        what: str,
        tell: Callable[[str], None] | None,
        *,
        first_after_s: float = FIRST_AFTER_S,
        then_every_s: float = THEN_EVERY_S,
    ) -> None:
        self._what = self._now = what
        self._tell = tell
        self._intervals = (first_after_s, then_every_s)
        self._is_over = threading.Event()
        self._printed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LongTask:
        self._begun = time.monotonic()
        if self._tell is not None:
            self._thread = threading.Thread(target=self._print_more, daemon=True, name="lightning_pp: long task")
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self._printed and error is None and self._tell is not None:
            self._tell(f"{self._what} took {self._seconds():.0f} s.")

    def update(self, what: str) -> None:
        """The task has come to another part, which the next line names."""
        self._now = what

    def _print_more(self) -> None:
        assert self._tell is not None
        wait_s, every_s = self._intervals
        while not self._is_over.wait(wait_s):
            self._printed = True
            self._tell(f"{self._now}: {self._seconds():.0f} s so far.")
            wait_s = every_s

    def _seconds(self) -> float:
        return time.monotonic() - self._begun
