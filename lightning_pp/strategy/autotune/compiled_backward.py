"""What is not compiled as it could be: found in a training's first batch, and told once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.runtime.compilation import NOTHING_TO_COMPILE, CompiledUnits, is_one_operation
from lightning_pp.schedule import Schedule

_MOST_NAMES = 8


class CompiledBackward:
    """Tells once which units run uncompiled, and which weights get their gradient in I, though the backward is split.

    Args:
        groups: Joins the ranks of the pipeline.
        units: Those that this rank has compiled.
    """

    def __init__(self, groups: ControlGroups, units: CompiledUnits) -> None:
        self._groups, self._units = groups, units
        self._has_run = self._splits = self._is_done = False

    def note(self, schedule: Schedule) -> None:
        """Says that a training batch has been run."""
        self._has_run, self._splits = True, self._splits or schedule.splits_backward

    def report(self) -> None:
        """Before a training batch; every rank of the pipeline has to call it. One small gather, once in a training."""
        if self._is_done or not self._has_run:
            return
        self._is_done = True
        parts = self._groups.gather_in_pipeline((self._units.kept_in_backward(), self._units.uncompiled()))
        names = list(dict.fromkeys(name for kept, _ in parts for name in kept))
        if names and self._splits:
            rank_zero_info(_text(names))
        if uncompiled := {name: reason for _, reasons in parts for name, reason in reasons.items()}:
            rank_zero_info(
                f"compile: {len(uncompiled)} units with parts of matrices run uncompiled: {_listed(list(uncompiled))}. "
                f"The reason for the first: {next(iter(uncompiled.values()))}"
            )

    def start_over(self) -> None:
        """After a step that failed: ranks may have run different numbers of batches, so counting starts again."""
        self._has_run = False


def compiled_units(
    split: SplitModel, rank: int, groups: ControlGroups, options: Mapping[str, Any] | None
) -> tuple[CompiledUnits | None, CompiledBackward | None]:
    """The units of ``rank`` to be compiled with ``options``, and what tells of them; None where nothing is compiled."""
    if options is None:
        return None, None
    if all(map(is_one_operation, split.units.values())):
        rank_zero_warn(NOTHING_TO_COMPILE)
    units = CompiledUnits(split.units_of(rank), options)
    return units, CompiledBackward(groups, units)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")


def _text(names: list[str]) -> str:
    return (
        f"compile: the gradients of {len(names)} weights are computed in I and cannot fill bubbles: {_listed(names)}. "
        "A weight's gradient can wait for W if a matrix product or a convolution uses the weight as it is. That must "
        "be outside checkpointed code of the unit, and compile= must compile the unit, not your own code."
    )
