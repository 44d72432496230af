"""Finds the later uses of random numbers that code between units draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pp.split._torch_private import tree_leaves
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.record.sources import storage_of


class DrawnValues:
    """Follows drawn numbers through a dry run, by their memory, whose numbers the dry run holds.

    Attributes:
        uses: ``(calls before the draw, calls before the use)`` to the user's line of the first such use. Calls of units
            count; within a unit, those before it do.
    """

    def __init__(self) -> None:
        self.uses: dict[tuple[int, int], str] = {}
        self._drawn_after: dict[int | None, int] = {}

    def found_in(self, func: Any, inputs: list[Tensor], num_calls: int, unit_call: int | None) -> int | None:
        """Before an operation: the earliest draw that it works with; None for none.

        ``num_calls`` unit calls have come so far; ``unit_call`` is the one that is running, None between units.
        """
        found: int | None = None
        if self._drawn_after:
            draws = [self._drawn_after[storage] for storage in map(storage_of, inputs) if storage in self._drawn_after]
            found = min(draws, default=None)
            if found is not None:
                self.uses.setdefault((found, num_calls if unit_call is None else unit_call), user_line())
        if found is None and unit_call is None and torch.Tag.nondeterministic_seeded in func.tags:
            return num_calls
        return found

    def note(self, found: int | None, result: Any) -> None:
        """After the operation: its results come from that draw."""
        if found is None:
            return
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = storage_of(tensor)
                self._drawn_after[storage] = min(found, self._drawn_after.get(storage, found))
