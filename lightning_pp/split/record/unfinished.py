"""The record of a step that fails in its first run: the model is cut by it until the step can be recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_pp.split.record.step_record import Reads, StepRecord, UnitCall

# of a dense layer, per parameter and row; what else is unknown is assumed to be like it
_FLOPS_PER_PARAMETER = 2.0


def with_units_not_reached(
    record: StepRecord, num_parameters: Mapping[str, int], outside_units: Iterable[str]
) -> StepRecord:
    """Adds calls of the units that the step has not reached, in their order in the module.

    Their costs are estimated by their parameters and the costs of the units called; what flows between them is not
    known. Parameters outside of units may be used in any of them.

    Args:
        record: What was recorded until the step failed; it is changed.
        num_parameters: Name of each unit to its number of parameters, in the order of definition.
        outside_units: Canonical names of the parameters of no unit.
    """
    if record.calls and not record.calls[-1].leaves:
        record.calls.pop()  # the step has failed in it
    called = record.first_calls()
    known = sum(num_parameters[unit] for unit in called)
    flops = sum(call.flops for call in record.calls)
    ratio = flops / known if known and flops else _FLOPS_PER_PARAMETER
    outside_units = list(outside_units)
    line = "a line that the step has not reached"
    for unit, number in num_parameters.items():
        if unit in called:
            continue
        call = UnitCall(len(record.calls), unit, Reads(parameters=dict.fromkeys(outside_units, line)), line)
        call.flops = call.weight_flops = int(ratio * number)
        record.calls.append(call)
    record.tail.parameters.update(dict.fromkeys(outside_units, line))
    return record
