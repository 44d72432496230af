"""Assigning units to stages: consecutive runs of units in call order, the slowest as fast as possible."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.split.record import StepRecord

# A parameter costs about this many floating point operations a step besides its use: the optimizer reads and writes
# it, its gradient and its state. It matters where parameters come without FLOPs (embeddings).
FLOPS_PER_PARAMETER = 30.0


@dataclass(frozen=True)
class Partition:
    """Which stage each unit runs on.

    Attributes:
        num_stages: Number of stages.
        stage_of_unit: Unit name to stage.
        unit_costs: Unit name to its cost, in FLOPs of forward and backward; what the balance was made with.
    """

    num_stages: int
    stage_of_unit: Mapping[str, int]
    unit_costs: Mapping[str, float]

    def units_of_stage(self, stage: int) -> list[str]:
        """The units of ``stage`` in call order."""
        return [unit for unit, its_stage in self.stage_of_unit.items() if its_stage == stage]


def partition_units(
    record: StepRecord,
    *,
    num_stages: int,
    num_parameters: Mapping[str, int],
    split_points: Sequence[str] | None = None,
) -> Partition:
    """Cuts the units, in the order of their first calls, into ``num_stages`` consecutive runs.

    The cost of a unit is three times its forward FLOPs (backward costs twice the forward), with the code before it,
    plus :data:`FLOPS_PER_PARAMETER` for each parameter. The largest stage cost is minimised exactly, by dynamic
    programming over cuts. A unit that is called again after others, and others that its second call depends on, fall
    on one stage, since values flow from earlier stages to later ones only; the same holds for values that leave a unit
    by another way than its outputs.

    Args:
        record: A dry run of the training step (or of whatever step is to run).
        num_stages: Number of stages.
        num_parameters: Every unit's number of parameters; units that the step does not call are put on the stage of
            the unit named before them.
        split_points: Names of the units that start stages 1, 2, ...; overrides the balance.

    Raises:
        ConfigurationError: There are fewer units than stages, or ``split_points`` does not fit.
        SplitError: The order of calls leaves fewer places to cut than needed.
    """
    order = list(record.first_calls())
    costs = _unit_costs(record, order, num_parameters)
    if num_stages > len(order):
        raise ConfigurationError(
            f"{num_stages} stages need at least {num_stages} units, and the step calls {len(order)}: "
            f"{', '.join(order[:10])}{', ...' if len(order) > 10 else ''}. Use fewer stages (pipeline_parallel_size x "
            "stages_per_rank), or name smaller modules with units=."
        )
    groups = _inseparable_groups(record, order)
    if split_points is not None:
        starts = _starts_from_split_points(order, groups, split_points, num_stages)
    else:
        if num_stages > len(groups):
            tied = max(groups, key=len)
            raise SplitError(
                f"{num_stages} stages need {num_stages - 1} places to cut, and the order of calls leaves "
                f"{len(groups) - 1}: {', '.join(tied[:6])}{', ...' if len(tied) > 6 else ''} must share a stage, "
                f"because {_why_inseparable(record, tied)}."
            )
        starts = _balanced_starts([sum(costs[unit] for unit in group) for group in groups], num_stages)
        firsts = [order.index(group[0]) for group in groups]
        starts = [firsts[index] for index in starts]
    stage_of_unit: dict[str, int] = {}
    for index, unit in enumerate(order):
        stage_of_unit[unit] = sum(index >= start for start in starts[1:])
    previous = 0
    for unit in num_parameters:
        if unit in stage_of_unit:
            previous = stage_of_unit[unit]
        else:
            stage_of_unit[unit] = previous
            costs[unit] = FLOPS_PER_PARAMETER * num_parameters[unit]
    return Partition(num_stages, stage_of_unit, costs)


def _unit_costs(record: StepRecord, order: Sequence[str], num_parameters: Mapping[str, int]) -> dict[str, float]:
    costs = {unit: FLOPS_PER_PARAMETER * num_parameters[unit] for unit in order}
    for call in record.calls:
        costs[call.unit] += 3.0 * (call.flops + call.reads.flops)
    costs[order[-1]] += 3.0 * record.tail.flops
    return costs


def _inseparable_groups(record: StepRecord, order: Sequence[str]) -> list[list[str]]:
    """Consecutive units between which no cut is possible."""
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
    for made_by in record.tail.escapes:
        join(position[record.calls[made_by].unit], len(order) - 1)
    groups: list[list[str]] = []
    for index, unit in enumerate(order):
        if index and joined[index]:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def _why_inseparable(record: StepRecord, units: Sequence[str]) -> str:
    members = set(units)
    for reads, consumer in [*((call.reads, call.unit) for call in record.calls), (record.tail, "the end of the step")]:
        for made_by, line in reads.escapes.items():
            if record.calls[made_by].unit in members:
                return (
                    f"a tensor made inside {record.calls[made_by].unit!r} leaves it by another way than its outputs (a "
                    "hook, an attribute, a list, an edit in place or torch.autograd.grad) and is used by "
                    f"{consumer!r} at {line}; return it from the unit"
                )
    repeated = sorted({call.unit for call in record.calls if call.index != record.first_calls()[call.unit]} & members)
    return f"{', '.join(repeated)} is called again after units that its later call depends on"


def _balanced_starts(costs: Sequence[float], num_stages: int) -> list[int]:
    """Start index of every stage such that the largest sum is least; among equals the later stages are lighter."""
    count = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # best[s][i]: least largest cost when units i.. make s stages
    best = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    choice = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][count] = 0.0
    for stages in range(1, num_stages + 1):
        for start in range(count - stages, -1, -1):
            for stop in range(start + 1, count - stages + 2):
                largest = max(prefix[stop] - prefix[start], best[stages - 1][stop])
                if largest < best[stages][start]:
                    best[stages][start], choice[stages][start] = largest, stop
    starts, start = [], 0
    for stages in range(num_stages, 0, -1):
        starts.append(start)
        start = choice[stages][start]
    return starts


def _starts_from_split_points(
    order: Sequence[str], groups: Sequence[Sequence[str]], split_points: Sequence[str], num_stages: int
) -> list[int]:
    if len(split_points) != num_stages - 1:
        raise ConfigurationError(
            f"split_points names {len(split_points)} units ({', '.join(split_points)}), and {num_stages} stages have "
            f"{num_stages - 1} cuts between them; name the unit that starts each stage but the first."
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
                f"split_points must follow the order of calls, and {name!r} (call {start}) does not come after "
                f"{order[starts[-1]]!r} (call {starts[-1]})."
            )
        if all(group[0] != name for group in groups):
            group = next(group for group in groups if name in group)
            raise ConfigurationError(
                f"split_points cannot cut before {name!r}: {', '.join(group[:6])} must share a stage, because a later "
                "unit's value flows back to an earlier one. Cut before another unit."
            )
        starts.append(start)
    return starts
