"""Exceptions of every layer; each message names what is wrong, the numbers, and the fix."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """An option, a size or a combination of options cannot work."""


class ScheduleError(ValueError):
    """A schedule is unknown, malformed, or cannot be run (see :mod:`lightning_pp.schedule`)."""


class SplitError(RuntimeError):
    """The user's model or step cannot be cut into the requested stages."""


class BatchError(ValueError):
    """A batch cannot be cut into microbatches, or differs between the ranks of one pipeline."""


class CheckpointError(RuntimeError):
    """A checkpoint does not fit the model, or is damaged."""
