"""The summary of a cut: stages, their units with costs, and the tensors sent between stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn

from lightning_pp.planning.stage_model import Refinement, SplitModel
from lightning_pp.split.cut.wide_cuts import WideCut, wide_cuts
from lightning_pp.split.record.plan import Edge
from lightning_pp.split.record.step_record import Reads, StepRecord, UnitCall, Value


@dataclass(frozen=True)
class UnitSummary:
    """One unit; numbers that depend on the batch are for one microbatch.

    Attributes:
        name: Its fully qualified name.
        class_name: Its class.
        num_parameters: Parameters in it, those that it shares with other units included.
        parameter_bytes: Their bytes.
        num_calls: How often the step calls it.
        flops: Floating point operations of its forward.
        flops_before: Of the code since the call before, which its stage runs.
    """

    name: str
    class_name: str
    num_parameters: int
    parameter_bytes: int
    num_calls: int
    flops: int
    flops_before: int


@dataclass(frozen=True)
class CrossingSummary:
    """A tensor that crosses from one stage to another, in one microbatch.

    Attributes:
        value: The unit that makes it, with the place among its outputs where there are several; or the operation
            between units, with the unit before it.
        source: The stage that makes it.
        target: The stage that needs it.
        source_rank: The rank of ``source``.
        target_rank: The rank of ``target``; where it is the same, nothing is sent.
        shape: Its shape.
        dtype: Its dtype, as torch writes it after the dot.
        forward_bytes: Bytes that a rank sends forward.
        gradient_bytes: Bytes that a rank sends back; 0 where no gradient goes.
        joined_bytes: Bytes that a rank then gets from the other tensor ranks, each way, where each was sent a part.
    """

    value: str
    source: int
    target: int
    source_rank: int
    target_rank: int
    shape: tuple[int, ...]
    dtype: str
    forward_bytes: int
    gradient_bytes: int
    joined_bytes: int = 0

    @property
    def is_sent(self) -> bool:
        """Whether it goes to another rank."""
        return self.source_rank != self.target_rank


@dataclass(frozen=True)
class StageSummary:
    """One stage; numbers that depend on the batch are for one microbatch.

    Attributes:
        stage: Its number.
        rank: The pipeline rank that holds it.
        units: Its units in call order; those that the step does not call last.
        num_parameters: Parameters that it holds; one that several stages share counts in each.
        parameter_bytes: Their bytes.
        shared: Names of those that other stages hold as well.
        outside: Names of those that belong to no unit.
        flops: Floating point operations of its forward, those of the code between units included.
        flops_after: Of these, what follows the last unit; 0 for all stages but the last.
    """

    stage: int
    rank: int
    units: tuple[UnitSummary, ...]
    num_parameters: int
    parameter_bytes: int
    shared: tuple[str, ...]
    outside: tuple[str, ...]
    flops: int
    flops_after: int


@dataclass(frozen=True)
class CutSummary:
    """A model as it is cut into stages.

    Attributes:
        stages: In order.
        crossings: What crosses, in the order in which it is made.
        num_parameters: Parameters of the whole model, each once.
        num_trainable: Those of them that require a gradient.
        num_called_units: Units that the step calls.
        wide: Cuts that send much more than one activation.
        refinement: Which blocks are cut inside, and why; None for none.
    """

    stages: tuple[StageSummary, ...]
    crossings: tuple[CrossingSummary, ...]
    num_parameters: int
    num_trainable: int
    num_called_units: int
    wide: tuple[WideCut, ...] = ()
    refinement: Refinement | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that go from rank to rank for one microbatch, forward and back."""
        return sum(c.forward_bytes + c.gradient_bytes for c in self.crossings if c.is_sent)


def summarize_cut(split: SplitModel) -> CutSummary:
    """Describes how a model was cut."""
    num_stages, plan = split.placement.num_stages, split.step_plan()
    parameters = [split.fake_parameters.names[name] for name in split.owners]
    in_units = split.fake_parameters.unit_of_parameters(split.units)
    return CutSummary(
        tuple(_summarize_stage(split, stage, in_units) for stage in range(num_stages)),
        tuple(_summarize_edge(split, edge) for edge in plan.edges),
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        len(split.record.first_calls()),
        tuple(wide_cuts(plan)),
        split.refinement,
    )


def _summarize_stage(split: SplitModel, stage: int, in_units: Collection[str]) -> StageSummary:
    """One stage; ``in_units`` are the canonical names of all parameters that a unit has."""
    order = {name: place for place, name in enumerate(split.record.first_calls())}
    names = sorted(split.partition.units_of_stage(stage), key=lambda name: order.get(name, len(order)))
    units = tuple(_summarize_unit(split, name) for name in names)
    held = [name for name, stages in split.owners.items() if stage in stages]
    tail = split.record.tail.flops if stage == split.placement.num_stages - 1 else 0
    num_parameters, num_bytes = _size(split.fake_parameters.names[name] for name in held)
    return StageSummary(
        stage,
        split.placement.rank_of_stage[stage],
        units,
        num_parameters,
        num_bytes,
        tuple(name for name in held if len(split.owners[name]) > 1),
        tuple(name for name in held if name not in in_units),
        sum(unit.flops + unit.flops_before for unit in units) + tail,
        tail,
    )


def _summarize_unit(split: SplitModel, name: str) -> UnitSummary:
    unit = split.units[name]
    calls: list[UnitCall] = [call for call in split.record.calls if call.unit == name]
    before: list[Reads] = [call.reads for call in calls]
    num_parameters, num_bytes = _size(unit.parameters())
    return UnitSummary(
        name,
        type(unit).__name__,
        num_parameters,
        num_bytes,
        len(calls),
        sum(call.flops for call in calls),
        sum(reads.flops for reads in before),
    )


def _summarize_edge(split: SplitModel, edge: Edge) -> CrossingSummary:
    ranks = split.placement.rank_of_stage
    sent_bytes = edge.spec.sent_bytes(split.counted.record.num_tensor_ranks)
    return CrossingSummary(
        _name_of(split.record, edge.value),
        edge.source,
        edge.target,
        ranks[edge.source],
        ranks[edge.target],
        edge.spec.shape,
        str(edge.spec.dtype).removeprefix("torch."),
        sent_bytes,
        sent_bytes if edge.has_gradient else 0,
        edge.spec.num_bytes - sent_bytes if ranks[edge.source] != ranks[edge.target] else 0,
    )


def _name_of(record: StepRecord, value: Value) -> str:
    if not value.made_by_unit:
        made_at = record.operations[value.leaf].place
        return f"{made_at.name} after {record.calls[made_at.num_calls - 1].unit}"
    call = record.calls[value.call]
    num_made = sum(leaf.spec is not None for leaf in call.leaves)
    num_calls = sum(other.unit == call.unit for other in record.calls)
    place = f"[{value.leaf}]" if num_made > 1 else ""
    if num_calls > 1:
        place += f" of call {sum(other.unit == call.unit for other in record.calls[: call.index]) + 1}"
    return call.unit + place


def _size(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Number of parameters, and their bytes."""
    listed = list(parameters)
    return sum(p.numel() for p in listed), sum(p.numel() * p.element_size() for p in listed)
