"""When a search has to end."""

from __future__ import annotations

import time


class Deadline:
    """The end of a search that may take so many seconds of wall time, counted from now.

    Args:
        seconds: How long it may take; None: as long as it likes.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def has_passed(self) -> bool:
        """Whether the search has to end with what it has."""
        return self._end is not None and time.monotonic() >= self._end

    def left(self, most: float) -> float:
        """Seconds until then, between 0 and ``most``."""
        return most if self._end is None else min(most, max(0.0, self._end - time.monotonic()))


NEVER = Deadline()
"""For a search that is bounded by its effort alone."""
