"""Assigning units to stages: consecutive runs of units in call order, the slowest rank as fast as possible."""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.balance import CutProblem, balanced_starts, even_starts
from lightning_pp.split.cut.unit_costs import UnitCost, estimate_unit_costs
from lightning_pp.split.record.crossing import find_crossing
from lightning_pp.split.record.step_record import StepRecord


@dataclass(frozen=True)
class Partition:
    """Which stage each unit runs on.

    Attributes:
        num_stages: Number of stages.
        stage_of_unit: Unit name to stage.
        unit_costs: Name of each called unit to its cost; what the balance was made with.
    """

    num_stages: int
    stage_of_unit: Mapping[str, int]
    unit_costs: Mapping[str, UnitCost]

    def units_of_stage(self, stage: int) -> list[str]:
        """The units of ``stage`` in call order."""
        return [unit for unit, its_stage in self.stage_of_unit.items() if its_stage == stage]


@dataclass(frozen=True)
class UnitMemory:
    """The memory of units, and the limits of ranks.

    Attributes:
        fixed_bytes: Unit name to what it holds all the time: parameters, gradients, optimizer state.
        held_bytes: Unit name to what one microbatch holds there between forward and backward.
        num_held: For each stage, the most microbatches that it holds at a time.
        limit_bytes: For each rank, the most that it may hold.
    """

    fixed_bytes: Mapping[str, float]
    held_bytes: Mapping[str, float]
    num_held: Sequence[float]
    limit_bytes: Sequence[float]


def partition_units(
    record: StepRecord,
    *,
    placement: Placement,
    num_parameters: Mapping[str, int],
    split_points: Sequence[str] | None = None,
    costs: Mapping[str, UnitCost] | None = None,
    rank_speeds: Sequence[float] | None = None,
    memory: UnitMemory | None = None,
    even_stages: bool = False,
) -> Partition:
    """Cuts the units, in the order of their first calls, into consecutive runs, one for each stage of ``placement``.

    The time of the slowest rank is minimised (:func:`balanced_starts`), within the memory limits. Of cuts that are
    hardly different in time, those with the fewest bytes crossing are taken. Values flow from earlier stages to later
    ones only. So a unit that is called again after others, and the others that its second call depends on, fall on one
    stage; the same holds for values that leave a unit as side effects.

    Args:
        record: A dry run of the training step (or of whatever step is to run).
        placement: Which rank holds which stages.
        num_parameters: Every unit's number of parameters; units that the step does not call are put on the stage of
            the unit named before them.
        split_points: Names of the units that start stages 1, 2, ...; overrides the balance.
        costs: Cost of every called unit; by default an estimate (:func:`estimate_unit_costs`).
        rank_speeds: For each rank how fast it is, compared with the others; by default all alike.
        memory: What units hold and ranks may hold; None for no limit.
        even_stages: Whether stages are made alike (:func:`even_starts`), even if that makes ranks unequal.

    Raises:
        ConfigurationError: There are fewer units than stages, nothing fits the memory limit, or ``split_points``
            or ``rank_speeds`` do not fit.
        SplitError: The order of calls leaves fewer places to cut than needed.
    """
    num_stages = placement.num_stages
    order = list(record.first_calls())
    if not order:
        raise ConfigurationError(
            f"The step calls no layer, so it does not show how to cut the model into {num_stages} stages. First run a "
            "fit or another step that calls layers, with the same trainer, or run this step on one device."
        )
    unit_costs = costs or estimate_unit_costs(record, num_parameters)
    speeds = _checked_speeds(rank_speeds, placement.num_ranks)
    if num_stages > len(order):
        raise ConfigurationError(
            f"{num_stages} stages need at least {num_stages} units, but the step calls {len(order)}: "
            f"{', '.join(order[:10])}{', ...' if len(order) > 10 else ''}. Use fewer stages (pipeline_parallel_size x "
            "stages_per_rank), or name smaller modules with units=."
        )
    groups = inseparable_groups(record)
    if split_points is not None:
        starts = _starts_from_split_points(record, order, groups, split_points, num_stages)
    else:
        starts = _balanced_starts(record, order, groups, placement, unit_costs, speeds, memory, even_stages)
    stage_of_unit = {unit: bisect_right(starts, index) - 1 for index, unit in enumerate(order)}
    stage = 0
    for unit in num_parameters:
        stage = stage_of_unit.setdefault(unit, stage)
    return Partition(num_stages, stage_of_unit, unit_costs)


def _balanced_starts(
    record: StepRecord,
    order: Sequence[str],
    groups: Sequence[Sequence[str]],
    placement: Placement,
    unit_costs: Mapping[str, UnitCost],
    speeds: Sequence[float],
    memory: UnitMemory | None,
    even_stages: bool,
) -> list[int]:
    """For each stage, the index in ``order`` of its first unit."""
    num_stages = placement.num_stages
    if num_stages > len(groups):
        tied = max(groups, key=len)
        raise SplitError(
            f"{num_stages} stages need {num_stages - 1} cuts, but only {len(groups) - 1} can be made: "
            f"{', '.join(tied[:6])}{', ...' if len(tied) > 6 else ''} must share a stage, because "
            f"{why_inseparable(record, tied)}."
        )
    firsts = [order.index(group[0]) for group in groups]
    problem = CutProblem(
        placement,
        tuple(sum(unit_costs[unit].total for unit in group) for group in groups),
        tuple(speeds),
        tuple(sum(memory.fixed_bytes[unit] for unit in group) if memory else 0.0 for group in groups),
        tuple(sum(memory.held_bytes[unit] for unit in group) if memory else 0.0 for group in groups),
        tuple(memory.num_held) if memory else (0.0,) * num_stages,
        tuple(memory.limit_bytes) if memory else None,
        (0.0,) * len(firsts) if even_stages else tuple(_bytes_crossing(record, order, firsts)),
    )
    found = even_starts(problem) if even_stages else _starts_of(problem)
    if found is None:
        raise ConfigurationError(f"No cut of the model into {num_stages} stages keeps the memory limits.")
    return [firsts[index] for index in found]


# schedules of one placement ask for the same, and a search of plans comes back to it
_starts_of = lru_cache(maxsize=256)(balanced_starts)


def _checked_speeds(speeds: Sequence[float] | None, num_ranks: int) -> list[float]:
    if speeds is None:
        return [1.0] * num_ranks
    if len(speeds) != num_ranks or not all(0 < speed < float("inf") for speed in speeds):
        raise ConfigurationError(
            f"rank_speeds={list(speeds)} must have one positive number for each of the {num_ranks} pipeline ranks."
        )
    return [float(speed) for speed in speeds]


def _bytes_crossing(record: StepRecord, order: Sequence[str], firsts: Sequence[int]) -> list[float]:
    """Bytes of what crosses before each of the positions ``firsts``."""
    position = {unit: index for index, unit in enumerate(order)}
    places = [position[call.unit] for call in record.calls]
    stages = ([int(place >= first) for place in places] for first in firsts)
    return [float(find_crossing(record, stage_of_call, 2).num_bytes(record)) for stage_of_call in stages]


def inseparable_groups(record: StepRecord) -> list[list[str]]:
    """The units that the step calls, in order: those of a group must share a stage, and any other cut is possible."""
    order = list(record.first_calls())
    position = {unit: index for index, unit in enumerate(order)}
    joined = [False] * len(order)  # joined[i]: no cut just before unit i

    def join(first: int, last: int) -> None:
        for index in range(first + 1, last + 1):
            joined[index] = True

    for call in record.calls:
        here = position[call.unit]
        for value in call.reads.values:
            source = position[record.calls[value.call].unit]
            if source > here:
                join(here, source)
        for made_by in call.reads.escapes:
            source = position[record.calls[made_by].unit]
            join(min(here, source), max(here, source))
    for made_by in (*record.tail.escapes, *record.early_reads):
        join(position[record.calls[made_by].unit], len(order) - 1)
    groups: list[list[str]] = []
    for index, unit in enumerate(order):
        if index and joined[index]:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def why_inseparable(record: StepRecord, units: Sequence[str]) -> str:
    """Why the units of a group must share a stage: the end of a sentence that begins with ``because``."""
    members = set(units)
    for index, refusal in record.early_reads.items():
        if record.calls[index].unit in members:
            return refusal.rstrip(".")
    for reads, consumer in [*((call.reads, call.unit) for call in record.calls), (record.tail, "the end of the step")]:
        for made_by, line in reads.escapes.items():
            if record.calls[made_by].unit in members:
                return (
                    f"a tensor made inside {record.calls[made_by].unit!r} is used by {consumer!r} at {line}, but is "
                    "not an output of the unit (it leaves by a hook, an attribute, a list, an edit in place or "
                    "torch.autograd.grad); return it from the unit"
                )
    first = record.first_calls()
    again = [call for call in record.calls if call.unit in members and call.index != first[call.unit]]
    repeated = ", ".join(sorted({call.unit for call in again}))
    return (
        f"{repeated} is called again at {again[0].line}, after units that this call depends on; use fewer stages, or "
        "use units= to name a larger module that makes all these calls"
    )


def _starts_from_split_points(
    record: StepRecord,
    order: Sequence[str],
    groups: Sequence[Sequence[str]],
    split_points: Sequence[str],
    num_stages: int,
) -> list[int]:
    if len(split_points) != num_stages - 1:
        raise ConfigurationError(
            f"split_points names {len(split_points)} units ({', '.join(split_points)}), but {num_stages} stages need "
            f"{num_stages - 1} cuts. Name the unit that starts each stage except the first."
        )
    starts = [0]
    for name in split_points:
        if name not in order:
            close = difflib.get_close_matches(name, order, n=5, cutoff=0.3) or order[:5]
            raise ConfigurationError(
                f"split_points names {name!r}, which is not a unit that the step calls. The closest are: "
                f"{', '.join(close)}."
            )
        start = list(order).index(name)
        if start <= starts[-1]:
            raise ConfigurationError(
                f"split_points must follow the order of calls, but {name!r} (call {start}) does not come after "
                f"{order[starts[-1]]!r} (call {starts[-1]})."
            )
        if all(group[0] != name for group in groups):
            group = next(group for group in groups if name in group)
            raise ConfigurationError(
                f"split_points cannot cut before {name!r}: {', '.join(group[:6])} must share a stage, because "
                f"{why_inseparable(record, group)}. Or cut before another unit."
            )
        starts.append(start)
    return starts
