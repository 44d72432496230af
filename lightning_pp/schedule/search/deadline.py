"""The deadline of a search."""

from __future__ import annotations

import time

_SECONDS_OF_AN_ACTION = 4e-6
"""What a pass over orders takes for each action; 1.5 to 3 were measured."""


class Deadline:
    """The end of a search, a number of seconds of wall time from now.

    Args:
        seconds: How long it may take; None: as long as it likes.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def has_passed(self) -> bool:
        """Whether the search has to end with what it has."""
        return self._end is not None and time.monotonic() >= self._end

    def allows(self, num_actions: int) -> bool:
        """Whether there is time to look at so many actions, one by one; a search begins nothing that it is not."""
        return self._end is None or time.monotonic() + num_actions * _SECONDS_OF_AN_ACTION <= self._end


NEVER = Deadline()
"""For a search that is bounded by its effort alone."""
