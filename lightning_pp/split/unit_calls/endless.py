"""Dry runs that do not end: a step that decodes until its data say stop never hears that of made-up data."""

from __future__ import annotations

import time

from lightning_pp.errors import SplitError
from lightning_pp.split.record.source_lines import user_line

_CALLS_OF_EACH = 50
_FEWEST_CALLS = 500
_SECONDS = 60.0


class UnitsCalled:
    """Counts the calls of units in a dry run, and ends one in which the same units are called again and again."""

    def __init__(self, num_units: int) -> None:
        self._most = max(_FEWEST_CALLS, _CALLS_OF_EACH * num_units)
        self._seen: set[str] = set()
        self._num_calls = self._num_before = 0
        self._since = time.monotonic()

    def note(self, unit: str) -> None:
        """A unit is about to be called.

        Raises:
            SplitError: No unit has been called for the first time for a minute, or for very many calls.
        """
        self._num_calls += 1
        if unit not in self._seen:
            self._seen.add(unit)
            self._num_before, self._since = self._num_calls, time.monotonic()
            return
        calls, seconds = self._num_calls - self._num_before, time.monotonic() - self._since
        if calls <= self._most and seconds <= _SECONDS:
            return
        raise SplitError(
            f"The dry run of the step on fake data did not end. {user_line()} called {unit!r}, and all of the last "
            f"{calls} calls, made in {seconds:.0f} s, were of units that had been called before. A pipeline cannot run "
            "a step whose outputs decide how often it calls its units, such as decoding until a stop token. Decode in "
            "a Trainer() on one device, after strategy.gather_module() or from a checkpoint, and leave it out of the "
            "steps of the pipeline (limit_val_batches=0 leaves out validation)."
        )
