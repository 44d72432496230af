"""Heads that are cut into parts, in a recording, which finds out whether their parts can serve the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_pp.split.data.tree import tensors_of
from lightning_pp.split.head.deferred_logits import DeferredLogits, WholeHeadError, deferred
from lightning_pp.split.head.parts import HeadPart, parts_in
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.record.sources import Source
from lightning_pp.split.record.step_record import StepRecord


class SplitHeads:
    """The heads with parts, in one recording of a step.

    A step is served by parts if it calls one such head, once, and all that becomes of the logits is one cross entropy.
    """

    def __init__(self, units: Mapping[str, nn.Module], record: StepRecord) -> None:
        self._parts = parts_in(units)
        self._record = record

    def __contains__(self, unit: str) -> bool:
        """Whether a call of ``unit`` is deferred."""
        return unit in self._parts

    def called(
        self,
        unit: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        sources: frozenset[Source],
        *,
        in_region: bool,
    ) -> DeferredLogits:
        """The logits of the head ``unit``, whose values come from ``sources``.

        With ``in_region``, backward runs this code again.

        Raises:
            WholeHeadError: The head has to be called whole.
        """
        if self._record.split_head is not None:
            raise WholeHeadError(f"{user_line()} calls {unit!r} after another call of a head")
        if in_region:
            raise WholeHeadError(f"{user_line()} calls {unit!r} in code that is checkpointed outside of units")
        self._record.split_head = unit
        return deferred(self._parts[unit], args, kwargs, sources)

    def note_part(self, part: HeadPart) -> None:
        """Raises :class:`WholeHeadError` for a second loss of the same logits."""
        if any(call.unit == part.name for call in self._record.calls):
            raise WholeHeadError(f"{user_line()} takes the cross entropy of the logits of {part.head_name!r} again")

    def check_leaving(self, value: Any) -> None:
        """Raises :class:`WholeHeadError` if logits are in ``value``, which is kept, logged or returned."""
        if any(isinstance(tensor, DeferredLogits) for tensor in tensors_of(value)):
            raise WholeHeadError(f"the step returns, keeps or logs the logits of {self._record.split_head!r}")

    def check_end(self) -> None:
        """Raises :class:`WholeHeadError` if the step took no loss of the logits that it asked for."""
        head = self._record.split_head
        if head is not None and all(call.unit != self._parts[head][0].name for call in self._record.calls):
            raise WholeHeadError(f"the step takes no cross entropy of the logits of {head!r}")
