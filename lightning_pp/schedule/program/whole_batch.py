"""The order of a step whose loss needs the whole batch: all forwards of a rank, then all its backwards.

With ``whole_batch_loss`` the last stage runs the code after the last unit (the *tail*) once, on what all microbatches
gave. So no backward starts on the last stage before its last forward has ended. This alone settles the order of F and
backward on every rank: each F comes before the last forward of the last stage, and each I, B and W after it. A rank can
therefore only run its F first, and then its I, B and W; what is left to choose is the order among the F and among the
others. Keeping both as they were is always free of deadlock: an order of all actions that proves it for the programs
proves it again when its F are taken first, since no F waits for a backward.

Every rank then holds all microbatches at once, on all its stages, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.coded import OFFLOAD, CodedProgram, F

HELPS_WHOLE_BATCH = (
    "Use fewer samples in a batch (fewer microbatches of the same size), activation_checkpointing, or more pipeline "
    "ranks. Another schedule does not help, and neither does another number of microbatches for the same batch"
)
"""The end of errors about too little memory."""


def late_forward(program: CodedProgram) -> int | None:
    """Where in ``program`` an F stands after a backward; None if all F come first."""
    kinds = program.parts()[0]
    late = np.flatnonzero((kinds == F) & np.logical_or.accumulate((kinds != F) & (kinds < OFFLOAD)))
    return int(late[0]) if len(late) else None


def forwards_first(program: CodedProgram) -> CodedProgram:
    """The F of ``program`` in their order, then its I, W and B in theirs; all others are left out."""
    computing = program.below(OFFLOAD)
    return computing.with_codes(computing.codes[np.argsort(computing.parts()[0] != F, kind="stable")])


def whole_backwards(program: Sequence[Action]) -> tuple[Action, ...]:
    """``program`` with B instead of each I, and without W: nothing is held between I and W."""
    whole = (replace(action, kind=ActionKind.B) if action.kind is ActionKind.I else action for action in program)
    return tuple(action for action in whole if action.kind is not ActionKind.W)
