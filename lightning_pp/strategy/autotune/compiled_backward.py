"""Units and weights that are not fully compiled: found in a training's first batch, and logged once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.errors import enumerate_names
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.runtime.compilation import NOTHING_TO_COMPILE, CompiledUnits, is_one_operation


def log_uncompiled(groups: ControlGroups, units: CompiledUnits, *, splits_backward: bool) -> None:
    """Logs the units that run uncompiled, and the weights with gradients in I although the backward is split.

    Args:
        groups: Joins the ranks of the pipeline, all of which have to call it: one small gather.
        units: Those that this rank has compiled, after a training batch.
        splits_backward: Whether the schedule splits the backward.
    """
    parts = groups.gather_in_pipeline((units.kept_in_backward(), units.uncompiled()))
    names = list(dict.fromkeys(name for kept, _ in parts for name in kept))
    if names and splits_backward:
        rank_zero_info(
            f"compile: the gradients of {len(names)} weights are computed in I and cannot fill bubbles: "
            f"{enumerate_names(names, 8)}. A weight's gradient can wait for W if a matrix product or a convolution "
            "uses the weight as it is. That must be outside checkpointed code of the unit, and compile= must compile "
            "the unit, not your own code."
        )
    if uncompiled := {name: reason for _, reasons in parts for name, reason in reasons.items()}:
        rank_zero_info(
            f"compile: {len(uncompiled)} units with parts of matrices run uncompiled: "
            f"{enumerate_names(list(uncompiled), 8)}. The reason for the first: {next(iter(uncompiled.values()))}"
        )


def compiled_units(split: SplitModel, rank: int, options: Mapping[str, Any] | None) -> CompiledUnits | None:
    """The units of ``rank`` to be compiled with ``options``; None where nothing is compiled."""
    if options is None:
        return None
    if all(map(is_one_operation, split.units.values())):
        rank_zero_warn(NOTHING_TO_COMPILE)
    return CompiledUnits(split.units_of(rank), options)
