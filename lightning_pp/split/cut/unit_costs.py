"""The cost of each unit: measured times where there are some, else floating point operations of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import StageCosts
from lightning_pp.split.record.step_record import Reads, StepRecord, UnitCall

# A parameter costs about this many floating point operations a microbatch besides its use: its gradient is written and
# added up, and the optimizer reads and writes it with its state. It matters where parameters come without FLOPs, as in
# embeddings.
FLOPS_PER_PARAMETER = 30.0


@dataclass(frozen=True)
class UnitCost:
    """The cost of one microbatch in one unit, with the code before it, in any unit of time (FLOPs, milliseconds).

    Attributes:
        forward: F.
        backward_input: I.
        backward_weight: W.
    """

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """F, I and W together."""
        return self.forward + self.backward_input + self.backward_weight

    def scaled(self, factor: float) -> UnitCost:
        """This cost, multiplied."""
        return UnitCost(self.forward * factor, self.backward_input * factor, self.backward_weight * factor)


def estimate_unit_costs(
    record: StepRecord, num_parameters: Mapping[str, int], flops_per_byte: float = 0.0
) -> dict[str, UnitCost]:
    """FLOPs of every unit that the step calls, in call order, including the cost of moving bytes if it is known.

    An operation with a parameter (a linear, a convolution) costs as much in I and in W as in F; one between activations
    (attention) costs twice its F in I. Checkpointed code costs F once more in I. Code before a unit counts for it, code
    after the last one for the last. Each operation takes at least the time of moving its bytes
    (:meth:`OperationWork.times`).

    Args:
        record: A dry run of the step.
        num_parameters: Every unit's number of parameters. Each costs :data:`FLOPS_PER_PARAMETER` in W.
        flops_per_byte: FLOPs that the device computes while its memory moves a byte; 0 if that is not known: then only
            FLOPs count.
    """
    flops = {unit: [0.0, 0.0, FLOPS_PER_PARAMETER * num_parameters[unit]] for unit in record.first_calls()}

    def add(unit: str, part: UnitCall | Reads) -> float:
        forward, backward_input, backward_weight = _times(part, flops_per_byte)
        costs = flops[unit]
        costs[0] += forward
        costs[1] += backward_input
        costs[2] += backward_weight
        return forward

    last_of_region = {call.region: call.index for call in record.calls}
    for call in record.calls:
        forward = add(call.unit, call)
        flops[call.unit][1] += forward * _share_run_again(call, record, last_of_region)
        add(call.unit, call.reads)
    if record.calls:  # else there is nothing to cut, as partition_units says
        add(record.calls[-1].unit, record.tail)
    return {unit: UnitCost(*costs) for unit, costs in flops.items()}


def _share_run_again(call: UnitCall, record: StepRecord, last_of_region: Mapping[int | None, int]) -> float:
    """The share of ``call``'s forward that backward runs again; more than 1 for code that is checkpointed twice."""
    is_last = last_of_region[call.region] == call.index
    if call.region is None and call.unit not in record.recomputed_units:
        again = call.flops_run_again_inside
    elif not call.flops or (call.region is not None and not is_last):
        return 1.0  # a region runs up to its last operation whose result is kept
    else:
        again = call.flops_run_again
    return again / call.flops if call.flops else 0.0


def _times(part: UnitCall | Reads, flops_per_byte: float) -> tuple[float, float, float]:
    """F, I and W of some code, in FLOPs."""
    times = [float(part.flops), 2.0 * part.flops - part.weight_flops, float(part.weight_flops)]
    if flops_per_byte:
        for work, number in part.work.items():
            for place, (time, by_flops) in enumerate(zip(work.times(flops_per_byte), work.times(0.0), strict=True)):
                times[place] += number * (time - by_flops)
    return times[0], times[1], times[2]


def weighted(costs: Mapping[str, UnitCost], weights: Mapping[str, float]) -> dict[str, UnitCost]:
    """``costs`` with those of some units multiplied.

    Args:
        costs: Unit name to cost.
        weights: Name or shell pattern of units to factor. Where several patterns match, the last counts.

    Raises:
        ConfigurationError: A pattern matches no unit, or a factor is not a positive number.
    """
    factors = dict.fromkeys(costs, 1.0)
    for pattern, factor in weights.items():
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
            raise ConfigurationError(f"unit_weights[{pattern!r}]={factor!r} must be a positive number.")
        matching = [unit for unit in costs if fnmatchcase(unit, pattern)]
        if not matching:
            raise ConfigurationError(
                f"unit_weights names {pattern!r}, but no unit that the step calls matches it. The units are: "
                f"{', '.join(list(costs)[:10])}{', ...' if len(costs) > 10 else ''}."
            )
        factors.update(dict.fromkeys(matching, float(factor)))
    return {unit: cost.scaled(factors[unit]) for unit, cost in costs.items()}


def calibrated(
    costs: Mapping[str, UnitCost], measured: StageCosts, units_of_stages: Sequence[Sequence[str]]
) -> dict[str, UnitCost]:
    """``costs`` scaled so that they add up to what stages of these units were measured to take.

    Args:
        costs: Unit name to estimated cost.
        measured: Times of the stages, in milliseconds.
        units_of_stages: The units that each stage had when it was measured.

    Returns:
        Costs in milliseconds.

    Raises:
        ConfigurationError: The stages had other units than there are now.
    """
    known = [unit for units in units_of_stages for unit in units if unit in costs]
    if set(known) != set(costs):
        missing = [unit for unit in costs if unit not in known]
        raise ConfigurationError(
            f"The measured costs do not include {', '.join(missing[:10])}: they come from stages with other units. "
            "Measure again with this model."
        )
    resolved = measured.per_stage(len(units_of_stages))
    result = dict(costs)
    for stage, units in enumerate(units_of_stages):
        own = [unit for unit in units if unit in costs]
        totals = [costs[unit].total for unit in own]
        times = []
        for part in ("forward", "backward_input", "backward_weight"):
            time = getattr(resolved, part)[stage]
            # where nothing was estimated of a part, by the units' shares of all
            estimated = [getattr(costs[unit], part) for unit in own]
            weights = estimated if any(estimated) else totals if any(totals) else [1.0] * len(own)
            times.append([time * weight / sum(weights) for weight in weights])
        result |= {unit: UnitCost(*each) for unit, *each in zip(own, *times, strict=True)}
    return result


def stage_costs(
    costs: Mapping[str, UnitCost], stage_of_unit: Mapping[str, int], speeds_of_stages: Sequence[float]
) -> StageCosts:
    """What the stages cost that the units make; ``speeds_of_stages`` is how fast each stage's rank is."""
    sums = [[0.0, 0.0, 0.0] for _ in speeds_of_stages]
    for unit, cost in costs.items():
        stage = stage_of_unit[unit]
        for part, time in enumerate((cost.forward, cost.backward_input, cost.backward_weight)):
            sums[stage][part] += time / speeds_of_stages[stage]
    return StageCosts(*zip(*sums, strict=True))
