"""Costs of stages as a JSON file: what one run measured, for a later run or for planning without one.

The file says its units and what it was measured on, for people and for checks; numbers are those of ``StageCosts``::

    {
      "format": "lightning_pp.StageCosts/1",
      "units": {"time": "ms", "held": "GiB"},
      "num_stages": 2,
      "costs": {"forward": [3.1, 2.9], "backward_input": [3.0, 3.3], "backward_weight": [2.8, 2.7], "p2p": 0.1, ...},
      "measured_on": {"device": "cpu", "num_ranks": 2, "rank_of_stage": [0, 1], ...}
    }
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_pp.errors import ScheduleError

_FORMAT = "lightning_pp.StageCosts/1"
_REQUIRED = ("forward", "backward_input", "backward_weight")
_TIMES = (*_REQUIRED, "p2p", "gather", "reduce", "p2p_back", "offload")
_HELD = ("held_after_forward", "held_after_input", "held_on_host")
MICROBATCHES = "microbatches"
"""The unit of ``held_*`` where nobody measured bytes: one microbatch on one stage."""
GIB = "GiB"


@dataclass(frozen=True)
class CostsFile:
    """What a costs file says.

    Attributes:
        costs: Field of ``StageCosts`` to a number for all stages or a list with one per stage; times in milliseconds.
        held_unit: Unit of ``held_after_forward`` and ``held_after_input``: ``"GiB"``, or any other word.
        measured_on: What the costs were measured on: device, sizes, versions, the units of each stage; free form.
    """

    costs: Mapping[str, float | list[float]]
    held_unit: str = MICROBATCHES
    measured_on: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_stages(self) -> int | None:
        """Stages that the lists are for; None where every cost is one number for all."""
        return max((len(value) for value in self.costs.values() if isinstance(value, list)), default=None)

    def write(self, path: str | PathLike[str]) -> None:
        """Writes the file, whole or not at all; its folder is made if it is not there."""
        content = {
            "format": _FORMAT,
            "units": {"time": "ms", "held": self.held_unit},
            "num_stages": self.num_stages,
            "costs": dict(self.costs),
            "measured_on": dict(self.measured_on),
        }
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(target)


def read_costs_file(path: str | PathLike[str]) -> CostsFile:
    """Reads what :meth:`CostsFile.write` wrote, or what was written by hand in the same form.

    ``measured_on`` and the costs that ``StageCosts`` has defaults for may be left out.

    Raises:
        ScheduleError: The file cannot be read, is not JSON, or a part of it is missing, unknown or of a wrong type.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read the costs {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{path} is not a JSON file of costs: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ScheduleError(f'{path} is not a file of costs: its "format" is {found!r}, not {_FORMAT!r}')
    units, costs = content.get("units", {}), content.get("costs", {})
    measured_on = content.get("measured_on", {})
    for name, part in (("units", units), ("costs", costs), ("measured_on", measured_on)):
        if not isinstance(part, dict):
            raise ScheduleError(f'{path}: "{name}" is of type {type(part).__name__}, but must be an object')
    if units.get("time", "ms") != "ms":
        raise ScheduleError(
            f'{path}: times are in {units["time"]!r}. Give them in milliseconds, with "ms" as their unit'
        )
    missing = [name for name in _REQUIRED if name not in costs]
    unknown = [name for name in costs if name not in _TIMES + _HELD]
    if missing or unknown:
        raise ScheduleError(
            f"{path}: "
            + "; ".join([*(f"{name} is missing" for name in missing), *(f"{name!r} is not a cost" for name in unknown)])
            + f". Costs are {', '.join(_TIMES + _HELD)}."
        )
    for name, value in costs.items():
        numbers = value if isinstance(value, list) and value else [value]
        if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
            raise ScheduleError(f"{path}: {name} is {value!r}: give a number, or a list with one for each stage")
    return CostsFile(costs, str(units.get("held", MICROBATCHES)), measured_on)
