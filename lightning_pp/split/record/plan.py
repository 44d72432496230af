"""Makes a plan from a record and a partition: what each stage runs, receives and sends for one microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_pp.errors import SplitError
from lightning_pp.split.record.crossing import find_crossing
from lightning_pp.split.record.step_record import StepRecord, TensorSpec, Value


@dataclass(frozen=True)
class Edge:
    """A tensor that one stage makes and another needs.

    Attributes:
        value: Which unit output, or which result of the code between units.
        source: The stage that makes it.
        target: The stage that needs it; never the same.
        spec: Shape and dtype.
        has_gradient: Whether ``target`` sends a gradient back.
    """

    value: Value
    source: int
    target: int
    spec: TensorSpec
    has_gradient: bool


@dataclass(frozen=True)
class StagePlan:
    """What one stage does with one microbatch.

    Attributes:
        stage: Number of the stage.
        owned_calls: Indices of the unit calls that run here.
        last_call: Index of the last of them that anybody needs; the step ends there, or with the last result of the
            code right after it that is sent. None on the last stage, where it runs through to the loss, unless it
            keeps values. -1 where nothing runs.
        receives: Edges that end here, by value.
        sends: Edges that start here, by value.
        keeps: On the last stage, values to keep for one run of the step's end on the whole batch, received ones too.
    """

    stage: int
    owned_calls: frozenset[int]
    last_call: int | None
    receives: tuple[Edge, ...]
    sends: tuple[Edge, ...]
    keeps: frozenset[Value] = frozenset()


@dataclass(frozen=True, eq=False)  # each is a key of its own
class StepPlan:
    """What every stage does with one microbatch of a certain signature. All stages know all of it.

    Attributes:
        record: The dry run that it comes from.
        stages: One plan per stage.
        edges: Everything that crosses, in a fixed order.
    """

    record: StepRecord
    stages: tuple[StagePlan, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def crossing_operations(self) -> frozenset[int]:
        """Numbers of the operations between units whose results cross."""
        return frozenset(edge.value.leaf for edge in self.edges if not edge.value.made_by_unit)

    @cached_property
    def messages(self) -> tuple[str, ...]:
        """Every edge in words, for a comparison of ranks."""
        return tuple(
            f"{self.name_of(edge.value)}, {str(edge.spec.dtype).removeprefix('torch.')} of shape {edge.spec.shape}, "
            f"from stage {edge.source} to stage {edge.target}{' and its gradient back' if edge.has_gradient else ''}"
            for edge in self.edges
        )

    def name_of(self, value: Value) -> str:
        """``value`` in words."""
        if value.made_by_unit:
            return f"output {value.leaf} of unit call {value.call} ({self.record.calls[value.call].unit!r})"
        place = self.record.operations[value.leaf].place
        return f"result {value.leaf} of the code between units ({place.name}, after {place.num_calls} unit calls)"

    def resized(self, record: StepRecord) -> StepPlan:
        """The plan of a step that does the same on tensors of other sizes."""
        edges = {edge: replace(edge, spec=record.spec(edge.value)) for edge in self.edges}
        stages = [
            replace(stage, receives=tuple(edges[e] for e in stage.receives), sends=tuple(edges[e] for e in stage.sends))
            for stage in self.stages
        ]
        return StepPlan(record, tuple(stages), tuple(edges.values()))

    def operations_of(self, stage: int) -> list[int]:
        """Numbers of the operations between units that ``stage`` needs the results of and has not received."""
        record, own = self.record, self.stages[stage]
        waiting = [value for call in own.owned_calls for value in record.calls[call].reads.nearest]
        waiting += [edge.value for edge in own.sends]
        if stage == len(self.stages) - 1:
            waiting += record.tail.nearest
        found: set[int] = set()
        received = {edge.value for edge in own.receives}
        while waiting:
            value = waiting.pop()
            if not value.made_by_unit and value not in received and value.leaf not in found:
                found.add(value.leaf)
                waiting += record.operations[value.leaf].reads
        return sorted(found)


def build_plan(record: StepRecord, stage_of_unit: Mapping[str, int], num_stages: int) -> StepPlan:
    """Derives edges and stage plans.

    Raises:
        SplitError: A value would have to flow back to an earlier stage, or leaves its unit by another way than the
            unit's outputs and is needed on another stage.
    """
    stage_of_call = [stage_of_unit[call.unit] for call in record.calls]
    last_stage = num_stages - 1
    _check_flow(record, stage_of_call, last_stage)
    crossing = find_crossing(record, stage_of_call, num_stages)
    received = {(value, target) for target, values in enumerate(crossing.received) for value in values}
    edges = tuple(
        Edge(value, crossing.sources[value], target, record.spec(value), (value, target) in crossing.gradients)
        for value, target in sorted(received)
    )
    stages = []
    for stage in range(num_stages):
        owned = frozenset(call.index for call in record.calls if stage_of_call[call.index] == stage)
        last_call = None if stage == last_stage else max(owned, default=-1)
        stages.append(
            StagePlan(
                stage,
                owned,
                last_call,
                tuple(edge for edge in edges if edge.target == stage),
                tuple(edge for edge in edges if edge.source == stage),
            )
        )
    return StepPlan(record, tuple(stages), edges)


def direct_parameters(record: StepRecord, stage_of_unit: Mapping[str, int], num_stages: int) -> dict[str, set[int]]:
    """Parameters used outside the unit that holds them, and the stages that use them so."""
    users: dict[str, set[int]] = {}
    for call in record.calls:
        for name in call.reads.parameters:
            users.setdefault(name, set()).add(stage_of_unit[call.unit])
    for name in record.tail.parameters:
        users.setdefault(name, set()).add(num_stages - 1)
    return users


def _check_flow(record: StepRecord, stage_of_call: list[int], last_stage: int) -> None:
    for reads, consumer, stage in [
        *((call.reads, f"the unit {call.unit!r} at {call.line}", stage_of_call[call.index]) for call in record.calls),
        (record.tail, "the end of the step", last_stage),
    ]:
        for value in reads.values:
            source = stage_of_call[value.call]
            if source > stage:
                unit = record.calls[value.call].unit
                raise SplitError(
                    f"{consumer} runs on stage {stage} and needs an output of {unit!r}, which runs on the later stage "
                    f"{source}. Values go to later stages only. A unit that is called again must share a stage with "
                    "the units in between: use fewer stages, or split_points that keep them together. Run code that "
                    "calls the whole model on its own output (sampling, decoding) on one device, from a checkpoint."
                )
        for made_by, line in reads.escapes.items():
            source, unit = stage_of_call[made_by], record.calls[made_by].unit
            if source != stage:
                raise SplitError(
                    f"A tensor made inside the unit {unit!r} (stage {source}) is used by {consumer} (stage {stage}) at "
                    f"{line}, but is not an output of the unit. It leaves by a hook, an attribute, a list, an edit in "
                    "place or torch.autograd.grad. Return it from the unit, or keep the two on one stage with "
                    "split_points."
                )
    for index, refusal in record.early_reads.items():
        if stage_of_call[index] != last_stage:
            raise SplitError(refusal)
