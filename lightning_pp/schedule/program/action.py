"""Actions of a rank, and their notation.

The notation is that of ``torch.distributed.pipelining``: stage, kind, microbatch, as in ``3F0`` or ``3UNSHARD``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from lightning_pp.errors import ScheduleError


class ActionKind(str, Enum):
    """The kinds of actions; the value is the one that torch writes into its CSV files."""

    F = "F"
    """Forward of one microbatch on one stage."""
    I = "I"  # noqa: E741 - the field's own letter
    """Gradient of the stage's inputs; its weight gradients are deferred to W."""
    W = "W"
    """The weight gradients that I deferred."""
    B = "B"
    """The full backward: I and W in one."""
    OFFLOAD = "OFFLOAD"
    """Free what was copied to the host of one microbatch since its F, and wait until it is copied."""
    RELOAD = "RELOAD"
    """Begin to copy it back for its I or B."""
    UNSHARD = "UNSHARD"
    """Gather the stage's sharded parameters."""
    RESHARD = "RESHARD"
    """Free the gathered parameters."""
    REDUCE = "REDUCE_GRAD"
    """Reduce the stage's gradients over the data-parallel ranks."""

    @property
    def is_compute(self) -> bool:
        """True for F, I, W and B; false for what goes on beside them."""
        return self in _COMPUTE

    @property
    def has_microbatch(self) -> bool:
        """True for F, I, W, B, OFFLOAD and RELOAD; false for the sharding actions, which concern all microbatches."""
        return self in _COMPUTE or self in (ActionKind.OFFLOAD, ActionKind.RELOAD)

    def __str__(self) -> str:
        return self.value


USES_PARAMETERS = (ActionKind.F, ActionKind.I, ActionKind.B)
"""What uses gathered parameters."""
_COMPUTE = frozenset({ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B})
_KIND_OF_TEXT = {kind.value: kind for kind in ActionKind} | {"REDUCE": ActionKind.REDUCE}
_PATTERN = re.compile(r"([0-9]+)([A-Z_]+?)([0-9]*)")
_MOST_DIGITS = 6
_MOST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a program.

    Attributes:
        stage: Index of the stage, counted from the model's input.
        kind: What is done.
        microbatch: Index of the microbatch; None for the sharding actions, which concern all of them.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind.value}{microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read one action, the reverse of ``str(action)``.

        Raises:
            ScheduleError: The text is not an action, its kind is unknown, or its microbatch is missing.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{_shown(text)} is not an action: write stage, kind, microbatch, as in '3F0' or '3UNSHARD'"
            )
        stage, kind_text, microbatch = match.groups()
        kind = _KIND_OF_TEXT.get(kind_text)
        if kind is None:
            known = ", ".join(_KIND_OF_TEXT)
            raise ScheduleError(f"{_shown(text)} has the unknown kind {kind_text!r}: known are {known}")
        if not microbatch and kind.has_microbatch:
            raise ScheduleError(f"{_shown(text)} lacks its microbatch: write {text.strip()}0 for the first one")
        if len(stage) > _MOST_DIGITS or len(microbatch) > _MOST_DIGITS:
            raise ScheduleError(f"{_shown(text)} has a number of more than {_MOST_DIGITS} digits")
        return cls(int(stage), kind, int(microbatch) if microbatch else None)


def _shown(text: str) -> str:
    """``text`` as an error has it."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")
