"""A schedule as data: the ordered actions of every rank for one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.coded import KIND_OF_INDEX, CodedProgram
from lightning_pp.schedule.program.placement import Placement


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks for one step of ``num_microbatches`` microbatches.

    Attributes:
        name: Name of the family that made it, or of the file it was read from.
        placement: Which rank holds which stages.
        num_microbatches: Number of microbatches of a step, ``m`` in formulas.
        programs: For each rank, its actions in the order in which it runs them: a tuple, or a
            :class:`~lightning_pp.schedule.program.coded.CodedProgram`.
        whole_batch_loss: Whether the last stage starts no backward before its last forward, since the loss needs the
            whole batch (:mod:`lightning_pp.schedule.program.whole_batch`).
    """

    name: str
    placement: Placement
    num_microbatches: int
    programs: tuple[Sequence[Action], ...]
    whole_batch_loss: bool = False

    @cached_property
    def splits_backward(self) -> bool:
        """True when some backward is split into I and W."""
        return any(_has_kind(program, (ActionKind.I,)) for program in self.programs)

    @cached_property
    def forward_only(self) -> bool:
        """True when there is no backward at all, as in evaluation."""
        backward = (ActionKind.I, ActionKind.W, ActionKind.B)
        return not any(_has_kind(program, backward) for program in self.programs)


def _has_kind(program: Sequence[Action], kinds: tuple[ActionKind, ...]) -> bool:
    """Whether ``program`` has an action of one of ``kinds``."""
    if isinstance(program, CodedProgram):
        found = np.unique(program.codes // (program.num_stages * program.num_microbatches))
        return any(KIND_OF_INDEX[index] in kinds for index in found)
    return any(action.kind in kinds for action in program)
