"""Which units can be replaced by their children without any other change of the step.

A unit runs on one stage, with its hooks, in one piece; the code of a refined one is code between units, which runs on
every stage. So a unit is refined only if nothing can be told of it from outside (:func:`refinable`), and what the
recording of the refined step says has to be what was said before (:func:`what_differs`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from lightning_pp.planning.stage_model import RecordedModel
from lightning_pp.split._torch_private import COMPILED_CALL, forward_hooks_of, forward_pre_hooks_of
from lightning_pp.split.record.reduction import Kind
from lightning_pp.split.record.step_record import StepRecord, UnitCall
from lightning_pp.split.side_effects.hooks import user_hooks
from lightning_pp.split.unit_calls.units import refine_unit

_LEAST_CHILDREN = 2


def refinable(recording: RecordedModel) -> list[str]:
    """The units that may be refined, in the order of their calls.

    Each is called once, as it was written: not compiled, with the ``forward`` of its class, without hooks, and with all
    of its parameters and buffers in children.
    """
    calls: dict[str, list[UnitCall]] = {}
    for call in recording.record.calls:
        calls.setdefault(call.unit, []).append(call)
    updated = {name for pair in recording.record.updates.items() for name in (pair[0], *pair[1])}
    names_of = recording.fake_parameters.canonical_names
    return [
        name
        for name, (first, *others) in calls.items()
        if not others
        and _runs_as_written(recording.units[name])
        and _is_sum_of_children(name, recording.units[name])
        and first.looks_at is None
        and not first.is_cast
        and not any(names_of[f"{name}.{key}"] in updated for key, _ in recording.units[name].named_parameters())
    ]


def _runs_as_written(unit: nn.Module) -> bool:
    own = vars(unit)
    if "forward" in own or own.get(COMPILED_CALL) is not None:
        return False
    return not any(_has_hooks(module) for module in (unit, *unit.children()))


def _has_hooks(module: nn.Module) -> bool:
    if user_hooks(forward_hooks_of(module)) or user_hooks(forward_pre_hooks_of(module)):
        return True
    return any(getattr(module, name, None) for name in ("_backward_hooks", "_backward_pre_hooks"))


def _is_sum_of_children(name: str, unit: nn.Module) -> bool:
    children = refine_unit(name, unit).values()
    if len(set(children)) < _LEAST_CHILDREN:
        return False
    held = {id(tensor) for child in children for tensor in (*child.parameters(), *child.buffers())}
    return all(id(tensor) in held for tensor in (*unit.parameters(), *unit.buffers()))


def what_differs(whole: RecordedModel, finer: RecordedModel, names: Collection[str]) -> str | None:
    """What the step does otherwise where the units ``names`` are refined; None if nothing.

    Args:
        whole: The model and its step before.
        finer: The same with these units refined.
        names: The units.
    """
    if finer.record.failure is not None:
        return str(finer.record.failure)
    before, after = _course(whole.record), _course(finer.record)
    for what, found in after.items():
        if found != before[what]:
            return what
    for call in finer.record.calls:
        of_refined = any(call.unit.startswith(f"{name}.") for name in names)
        if of_refined and call.is_cast:
            return f"{call.unit} gets other arguments than when the block is whole"
    return None


def _course(record: StepRecord) -> Mapping[str, Any]:
    """What a step does outside of units, as far as it may change what a step gives, or when it is rehearsed."""
    of_all = [record.tail, *(call.reads for call in record.calls)]
    return {
        "its control flow depends on values": (record.depends_on_batch_values, record.num_looks),
        "its control flow depends on random numbers": (record.may_branch_at_random, record.inter_unit_draws.in_python),
        "it reads the training's progress": record.reads_progress,
        "it reads values": len(record.value_reads_in_tail),
        "its shapes depend on values": record.has_dynamic_shapes,
        "it sets attributes": record.mutated_attributes,
        "it carries state": record.carried,
        "it writes into its batch": record.edits_batch,
        "it writes into parameters": record.updates,
        "it uses parameters outside of units": record.parameters_used_outside(),
        "it has norms of another dtype": record.weights_of_float32_norms,
        # residuals are added; what else bears on how a loss grows with the batch stays inside
        "it sums up, multiplies or divides": sum(each.kind is not Kind.ADDITION for each in record.reductions),
        "values leave units by side effects": sum(len(reads.escapes) for reads in of_all),
    }
