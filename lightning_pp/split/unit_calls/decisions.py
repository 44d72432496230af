"""Branches that the code after the last unit takes by values that depend on weights (``if loss > 2``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_pp.errors import SplitError
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.unit_calls.compilation import uncompiled_outside_units
from lightning_pp.split.unit_calls.interception import OutsideUnits, running_unit

Taken = list[tuple[str, bool]]


class Decisions:
    """Compares the branches that microbatches take, since on one device the batch as a whole decides.

    Args:
        lines: The lines that look at such a value.
    """

    def __init__(self, lines: frozenset[str]) -> None:
        self._lines = lines
        self._earlier: dict[int, Taken] = {}

    @contextmanager
    def of_microbatch(self, microbatch: int) -> Iterator[None]:
        """Around the step of a microbatch.

        Raises:
            SplitError: At the end, if it went another way at one of the lines than an earlier microbatch.
        """
        watch = _Watch(self._lines)
        with uncompiled_outside_units(), watch:
            yield
        for other, taken in self._earlier.items():
            for line in self._lines:
                mine, theirs = ([result for at, result in each if at == line] for each in (watch.taken, taken))
                for here, there in zip(mine, theirs, strict=False):
                    if here is not there:
                        raise SplitError(
                            f"{line} branches by a value that depends on weights. It is {there} for microbatch {other} "
                            f"and {here} for microbatch {microbatch}. On one device the value of the whole batch "
                            "decides. Make the branch depend on the batch only, or set whole_batch_loss=True on the "
                            "strategy, which runs the code after the last unit once on the whole batch."
                        )
        self._earlier[microbatch] = watch.taken


class _Watch(OutsideUnits):
    """Notes what Python makes of tensors for an ``if`` at certain lines."""

    def __init__(self, lines: frozenset[str]) -> None:
        super().__init__()
        self._lines = lines
        self.taken: Taken = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        result = func(*args, **(kwargs or {}))
        if type(result) is bool and not running_unit() and (line := user_line()) in self._lines:
            self.taken.append((line, result))
        return result
