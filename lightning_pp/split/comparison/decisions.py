"""Branches that the code after the last unit takes by values that depend on weights (``if loss > 2``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.unit_calls.compilation import uncompiled_outside_units
from lightning_pp.split.unit_calls.interception import OutsideUnits, running_unit

Decision = tuple[str, bool]
"""A line, and the truth value that Python has there."""


class Decisions:
    """Notes the branches that microbatches take: on one device the batch as a whole decides.

    Args:
        lines: The lines that look at such a value.

    Attributes:
        taken: By microbatch.
    """

    def __init__(self, lines: frozenset[str]) -> None:
        self._lines = lines
        self.taken: dict[int, frozenset[Decision]] = {}

    @contextmanager
    def of_microbatch(self, microbatch: int) -> Iterator[None]:
        """Around the step of a microbatch."""
        watch = _Watch(self._lines)
        with uncompiled_outside_units(), watch:
            yield
        self.taken[microbatch] = frozenset(watch.taken)


class _Watch(OutsideUnits):
    """Notes what Python makes of tensors for an ``if`` at certain lines."""

    def __init__(self, lines: frozenset[str]) -> None:
        super().__init__()
        self._lines = lines
        self.taken: set[Decision] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        result = func(*args, **(kwargs or {}))
        if type(result) is bool and not running_unit() and (line := user_line()) in self._lines:
            self.taken.add((line, result))
        return result
