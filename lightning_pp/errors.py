"""Exceptions of every layer; each message names what is wrong, the numbers, and the fix."""

from __future__ import annotations

import logging
from collections.abc import Sequence

_log = logging.getLogger(__name__)


class ConfigurationError(ValueError):
    """An option, a size or a combination of options cannot work."""


class ScheduleError(ValueError):
    """A schedule is unknown, malformed, or cannot be run (see :mod:`lightning_pp.schedule`)."""


class SplitError(RuntimeError):
    """The user's model or step cannot be cut into the requested stages."""


class BatchError(ValueError):
    """A batch cannot be cut into microbatches, or differs between the ranks of one pipeline."""


class NonFiniteError(ArithmeticError):
    """A loss or a gradient is NaN or infinite.

    Args:
        what: What is, and where.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)

    def __str__(self) -> str:
        return (
            f"{super().__str__()} No update used it: resume from the last checkpoint. on_nonfinite='skip' skips such "
            "updates on all ranks, on_nonfinite='ignore' turns the check off."
        )


class CheckpointError(RuntimeError):
    """A checkpoint does not fit the model, or is damaged."""


def enumerate_names(names: Sequence[str], most: int = 10) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def add_note(error: Exception, note: str) -> None:
    """Adds a note to an exception. Python 3.10 prints no notes, so it is logged there too."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        vars(error).setdefault("__notes__", []).append(note)
        _log.error(note)
