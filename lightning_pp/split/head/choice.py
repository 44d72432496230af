"""Whether a last projection is cut along its classes, and into how many parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

from torch import nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.split.cut.unit_costs import estimate_unit_costs
from lightning_pp.split.head.parts import is_head
from lightning_pp.split.record.step_record import StepRecord

SplitHead: TypeAlias = bool | int | Literal["auto"]
"""How many parts; False: none; ``"auto"``: as many as the balance needs, if the head costs more than a stage."""

# so that the balance is no worse than by half of this part of a stage
_PARTS_OF_A_STAGE = 8
_MOST_PARTS = 64
# with fewer, what a part does besides its product would be a good part of it
_LEAST_CLASSES = 4096


def check_split_head(value: SplitHead) -> None:
    """Raises :class:`ConfigurationError` unless ``value`` is False, ``"auto"`` or a number of parts."""
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 2
    if value is not False and value != "auto" and not is_number:
        raise ConfigurationError(
            f"split_head={value!r} must be False, 'auto', or the number of parts that the last projection is cut into, "
            "at least 2."
        )


def head_to_split(
    units: Mapping[str, nn.Module],
    record: StepRecord,
    num_parameters: Mapping[str, int],
    split_head: SplitHead,
    num_stages: int,
) -> tuple[str, int] | None:
    """The head of a step that was recorded with its head whole, and the number of its parts; None: cut nothing."""
    if split_head is False or num_stages < 2 or not record.calls or record.failure is not None:
        return None
    name = record.calls[-1].unit
    head = units[name]
    if not is_head(head) or sum(call.unit == name for call in record.calls) > 1:
        return None
    costs = estimate_unit_costs(record, num_parameters)
    share = costs[name].total * num_stages / sum(cost.total for cost in costs.values())
    if split_head == "auto":
        is_heavy = share > 1 and head.out_features >= _LEAST_CLASSES
        # a multiple of the number of stages, which can all have as many then, as two chunks in a V do
        num_parts = min(math.ceil(_PARTS_OF_A_STAGE * share / num_stages) * num_stages, _MOST_PARTS)
        return (name, num_parts) if is_heavy else None
    return name, int(split_head)


def about_whole_head(head: str, reason: str) -> str:
    """Why a head that could be cut is not."""
    return f"The head {head!r} stays whole on one stage, because {reason}. A head in parts serves one cross entropy."
