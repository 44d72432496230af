"""From a whole model to one rank's part of it. Knows torch.distributed, not Lightning."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.activation_checkpointing import ActivationCheckpointing, policy_of, recomputation_of
from lightning_pp.planning.alike_units import Again, AlikeUnits, Step
from lightning_pp.planning.steps.plans import StepPlanCache
from lightning_pp.planning.tensor_parts import Call, OnParts, TensorRanks, arguments_noted, cut_on_parts
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.dry_run.weight_updates import Updates
from lightning_pp.split.fakes.materialize import materialize_buffers
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.split.head.choice import SplitHead, about_whole_head, head_to_split
from lightning_pp.split.head.parts import HeadPart, with_parts
from lightning_pp.split.memory.state_memory import ParameterSize, parameter_sizes
from lightning_pp.split.record.plan import StepPlan, build_plan, direct_parameters
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.record.unfinished import with_units_not_reached
from lightning_pp.split.unit_calls.units import discover_units, is_block_list, refine_unit, with_refined
from lightning_pp.tensor.parts import TensorPart
from lightning_pp.tensor.units import TensorParallelUnits

_MOST_REFINEMENTS = 32


@dataclass(frozen=True)
class Refinement:
    """Units that are replaced by their children, since cuts inside of them make a step shorter.

    Attributes:
        blocks: Their names.
        before_ms: Estimated time of a step with cuts between whole blocks, on a device that is assumed; infinite where
            these do not keep the limit of memory.
        after_ms: And with these.
    """

    blocks: tuple[str, ...]
    before_ms: float
    after_ms: float

    def __str__(self) -> str:
        several = len(self.blocks) > 1
        where = f"{len(self.blocks)} blocks" if several else "a block"
        if math.isinf(self.before_ms):
            why = "no cut between whole blocks stays within the memory limit"
        else:
            saved = 1 - self.after_ms / self.before_ms
            whole = "these blocks" if several else "this block"
            why = f"a step is estimated to take {saved:.1%} less time than with {whole} whole"
        return f"Cuts fall inside of {where} ({', '.join(self.blocks)}): {why}."


@dataclass(frozen=True)
class SplitModel:
    """A model, its units and who owns what.

    Attributes:
        module: The whole model; on this rank only ``owned`` parameters are left in it.
        units: Name to module.
        fake_parameters: Fakes for the rest.
        plans: Plans by batch signature.
        partition: Which stage each unit is on.
        placement: Which rank each stage is on.
        owners: Canonical parameter name to the stages that hold it, in order.
        direct: Canonical names of parameters that are used outside their unit.
        num_parameters: Parameters in each unit.
        record: The dry run that the partition was made from.
        recomputation: Which units are run again in backward; None for none.
        refinement: Which blocks are cut inside, and why; None for none.
        tensor: This rank's units, to be cut over the tensor axis; None without one.
        on_parts: The step as a tensor rank computes it; None without such, or where it cannot be recorded.
    """

    module: nn.Module
    units: Mapping[str, nn.Module]
    fake_parameters: FakeParameters
    plans: StepPlanCache
    partition: Partition
    placement: Placement
    owners: Mapping[str, tuple[int, ...]]
    direct: frozenset[str]
    num_parameters: Mapping[str, int]
    record: StepRecord
    recomputation: Recomputation | None = None
    refinement: Refinement | None = None
    tensor: TensorParallelUnits | None = None
    on_parts: OnParts | None = None

    @property
    def counted(self) -> SplitModel | OnParts:
        """The step as one rank computes it, by which costs and memory are counted."""
        return self.on_parts or self

    @property
    def tensor_parts(self) -> dict[str, TensorPart]:
        """How this rank's parameters that are cut lie over the tensor axis, by canonical name."""
        parts = {} if self.tensor is None else self.tensor.parts
        return {self.fake_parameters.canonical_names[name]: part for name, part in parts.items()}

    def step_plan(self) -> StepPlan:
        """What every stage does with a microbatch like the one that was recorded."""
        return build_plan(self.record, self.partition.stage_of_unit, self.placement.num_stages)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks whose value of a parameter, buffer or extra state is right, in the order of its stages."""
        stages = self.owners.get(name)
        if stages is None:  # no parameter; code between units runs to its end on the last stage only
            unit = next((unit for unit in self.units if name.startswith(unit + ".")), None)
            stages = (self.placement.num_stages - 1 if unit is None else self.partition.stage_of_unit[unit],)
        return tuple(dict.fromkeys(self.placement.rank_of_stage[stage] for stage in stages))

    def owned_by(self, rank: int) -> set[str]:
        """Canonical names of the parameters that ``rank`` holds."""
        return {name for name in self.owners if rank in self.ranks_of(name)}

    @cached_property
    def parameter_sizes(self) -> tuple[ParameterSize, ...]:
        """Sizes and places of all parameters, as :func:`~estimate_memory` takes them."""
        return parameter_sizes(self.counted.fake_parameters, self.units, self.owners, self.direct)

    def units_of(self, rank: int) -> dict[str, nn.Module]:
        """The units on ``rank``'s stages."""
        stages = self.placement.stages_of_rank(rank)
        return {name: unit for name, unit in self.units.items() if self.partition.stage_of_unit[name] in stages}


@dataclass(frozen=True, eq=False)  # each is a key of its own
class RecordedModel:
    """A model with its units, and its step as a dry run saw it.

    Attributes:
        module: The whole model.
        units: Name to module.
        fake_parameters: Fakes for parameters.
        record: The dry run.
        recomputation: Which units are run again in backward; None for none.
        whole: The same with its head in one piece, where it is cut here and may be left whole.
        about_head: Why its head is not cut, a sentence; empty where that was not to be.
        refinement: Which blocks are to be cut inside, and why; None for none.
        calls: What units are called with, without data; noted where there may be tensor ranks.
        again: Records the step once more, given what to make of it and other fakes.
        on_parts: The step as a tensor rank computes it; None without such, or where it cannot be recorded.
        not_on_parts: Why it cannot be recorded so.
    """

    module: nn.Module
    units: Mapping[str, nn.Module]
    fake_parameters: FakeParameters
    record: StepRecord
    recomputation: Recomputation | None = None
    whole: RecordedModel | None = None
    about_head: str = ""
    refinement: Refinement | None = None
    calls: Sequence[Call] = ()
    again: Again | None = None
    on_parts: OnParts | None = None
    not_on_parts: Exception | None = None

    @property
    def counted(self) -> RecordedModel | OnParts:
        """The step as one rank computes it, by which costs and memory are counted."""
        return self.on_parts or self

    @property
    def num_head_parts(self) -> int:
        """Parts that its head is cut into; 0 where it is whole."""
        return sum(isinstance(unit, HeadPart) for unit in self.units.values())

    @cached_property
    def num_parameters(self) -> dict[str, int]:
        """Parameters in each unit."""
        return _num_parameters(self.units)


@dataclass(frozen=True)
class RecordingOptions:
    """How a step is recorded.

    Attributes:
        compute_dtype: The dtype of parameters while their unit runs; None: their own.
        activation_checkpointing: The strategy's.
        may_fail: Whether a step that raises an exception is recorded up to there, and its other units by their
            parameters; see :func:`~lightning_pp.split.record.unfinished.with_units_not_reached`.
        split_head: In how many parts to cut a last projection with a cross entropy after it.
        refined: Names of units in whose place their children are units.
        tensor: Which ranks share matrices; None: none, now or later.
    """

    compute_dtype: torch.dtype | None = None
    activation_checkpointing: ActivationCheckpointing = False
    may_fail: bool = False
    split_head: SplitHead = False
    refined: Collection[str] = ()
    tensor: TensorRanks | None = None


RECORDED_PLAINLY = RecordingOptions()


def record_model(
    module: nn.Module,
    *,
    device: torch.device,
    step: Callable[[DryRun], Any],
    with_gradients: bool,
    patterns: Sequence[str] | None,
    num_stages: int,
    how: RecordingOptions = RECORDED_PLAINLY,
    like: RecordedModel | None = None,
) -> RecordedModel:
    """Finds the units of ``module``, at least ``num_stages`` of them if there are so many, and records ``step``.

    Nothing of the model is moved or dropped, except that its buffers go to ``device``.

    Args:
        module: The whole model.
        device: Where this rank computes.
        step: Runs the user's step for one microbatch.
        with_gradients: Whether it is a training step.
        patterns: What the user calls units, or None to discover them.
        num_stages: How many stages there are to be.
        how: Which units and values are recorded in another way than the model has them.
        like: The same with a batch of another size. Of units that do the same only one runs then.

    Raises:
        ConfigurationError, SplitError: As :func:`recomputation_of` and :func:`dry_run` say.
    """
    if like is not None and (found := _Recorder(like.fake_parameters, step, with_gradients, how).of_other_size(like)):
        return found
    materialize_buffers(module, device)
    fake_parameters = FakeParameters(module, device)
    fake_parameters.set_compute_dtype(how.compute_dtype)
    recorder = _Recorder(fake_parameters, step, with_gradients, how)
    units = with_refined(discover_units(module, patterns), how.refined)
    units, record = _recorded(module, units, fake_parameters, recorder.record, patterns, num_stages)
    # nobody casts those used outside for their unit, and it runs with them as they are
    uncast = record.parameters_used_outside() | record.weights_of_float32_norms
    if how.compute_dtype is not None and uncast:
        fake_parameters.set_compute_dtype(how.compute_dtype, uncast)
        record = recorder.record(units)
    recording = recorder.of(units, record)
    head = head_to_split(units, record, recording.num_parameters, how.split_head, num_stages)
    if head is None:
        return recording
    units = with_parts(units, *head)
    record = recorder.record(units)
    if record.split_head is None:
        return replace(recording, about_head=about_whole_head(head[0], record.whole_head))
    return recorder.of(units, record, whole=recording if how.split_head == "auto" else None)


@dataclass(frozen=True)
class _Recorder:
    """Records the step of :func:`record_model` with one set of units or another."""

    fake_parameters: FakeParameters
    step: Step
    with_gradients: bool
    how: RecordingOptions
    calls: list[Call] = field(default_factory=list)  # of the last recording, for tensor ranks

    def record(self, units: Mapping[str, nn.Module]) -> StepRecord:
        """A dry run with whole units."""
        with arguments_noted({} if self.how.tensor is None else units, self.calls):
            record = self._plans(units, self.fake_parameters).record(
                self.step, with_gradients=self.with_gradients, may_fail=self.how.may_fail
            )
        if record.failure is None:
            return record
        in_units = self.fake_parameters.unit_of_parameters(units)
        outside = set(self.fake_parameters.canonical_names.values()) - set(in_units)
        return with_units_not_reached(record, _num_parameters(units), outside)

    def of(
        self, units: Mapping[str, nn.Module], record: StepRecord, whole: RecordedModel | None = None
    ) -> RecordedModel:
        """The model with ``record``, the last one, and with the same on parts where there are tensor ranks."""
        module, how = self.fake_parameters.module, self.how
        recomputation = recomputation_of(how.activation_checkpointing, module, units, record)
        record.recomputed_units = frozenset() if recomputation is None else recomputation.units
        recording = RecordedModel(module, units, self.fake_parameters, record, recomputation, whole)
        if how.tensor is None:
            return recording
        calls, again = tuple(self.calls), partial(self._again, units)
        return on_tensor_ranks(replace(recording, calls=calls, again=again), how.tensor)

    def of_other_size(self, like: RecordedModel) -> RecordedModel | None:
        """``like`` with this step on a batch of another size; None where more than sizes differs."""
        whole = None if like.whole is None else self.of_other_size(like.whole)
        if like.record.failure is not None or (whole is None) != (like.whole is None):
            return None
        alike = AlikeUnits(like.record, like.units, like.fake_parameters.names)
        with arguments_noted({} if self.how.tensor is None else like.units, self.calls):
            record = alike.of_other_sizes(partial(self._again, like.units), like.fake_parameters)
        return None if record is None else replace(self.of(like.units, record, whole), about_head=like.about_head)

    def _again(
        self, units: Mapping[str, nn.Module], changed: Callable[[Step], Step], fake_parameters: FakeParameters
    ) -> StepRecord:
        plans = self._plans(units, fake_parameters)
        return plans.record(changed(self.step), with_gradients=self.with_gradients)

    def _plans(self, units: Mapping[str, nn.Module], fake_parameters: FakeParameters) -> StepPlanCache:
        unnamed = Recomputation((), policy_of(self.how.activation_checkpointing))
        return StepPlanCache(fake_parameters.module, units, fake_parameters, unnamed)


def on_tensor_ranks(recording: RecordedModel, ranks: TensorRanks, like: RecordedModel | None = None) -> RecordedModel:
    """``recording``, in which arguments are noted, with the same step on parts of matrices.

    ``like`` is the same with a batch of another size.

    Raises:
        ConfigurationError: The plan does not fit the model.
    """
    record, again = recording.record, recording.again
    if ranks.size == 1 or again is None:
        return recording
    recording = replace(recording, again=None)  # which holds a batch
    if record.failure is not None:
        return recording
    whole = None if recording.whole is None else on_tensor_ranks(recording.whole, ranks, like and like.whole)
    units, fakes = recording.units, recording.fake_parameters
    of_like = None if like is None else like.on_parts
    try:
        on_parts = cut_on_parts(units, fakes, record, recording.calls, ranks, again, of_like)
    except ConfigurationError:
        raise
    except Exception as error:  # of the user's code as well, which trains with parts only
        return replace(recording, whole=whole, not_on_parts=error)
    return replace(recording, whole=whole, on_parts=on_parts)


def with_recomputation(recording: RecordedModel, activation_checkpointing: ActivationCheckpointing) -> RecordedModel:
    """``recording`` as it is with other units run again in backward, without another dry run.

    Args:
        recording: Recorded without a policy of what checkpointed units save, which a dry run has to see.
        activation_checkpointing: The strategy's, without one either.

    Raises:
        ConfigurationError: As :func:`~lightning_pp.planning.activation_checkpointing.recomputation_of` says.
    """
    recomputation = recomputation_of(activation_checkpointing, recording.module, recording.units, recording.record)
    units = frozenset[str]() if recomputation is None else frozenset(recomputation.units)
    whole = None if recording.whole is None else with_recomputation(recording.whole, activation_checkpointing)
    record, on_parts = replace(recording.record, recomputed_units=units), recording.on_parts
    if on_parts is not None:
        on_parts = replace(on_parts, record=replace(on_parts.record, recomputed_units=units))
    return replace(recording, record=record, recomputation=recomputation, whole=whole, on_parts=on_parts)


def assign_stages(
    recording: RecordedModel,
    *,
    placement: Placement,
    partition: Partition,
    updates: Updates = MappingProxyType({}),
) -> SplitModel:
    """Assigns the units to stages and the parameters to owners.

    Args:
        recording: The model.
        placement: Which rank holds which stages.
        partition: Which stage each unit is on.
        updates: Parameters that hooks write into, and those that they compute their new values from.

    Raises:
        SplitError: As :func:`build_plan` says.
    """
    module, units = recording.module, recording.units
    fake_parameters, record = recording.fake_parameters, recording.record
    if record.failure is None:  # what cannot be cut is raised before anything changes
        build_plan(record, partition.stage_of_unit, placement.num_stages)
    places = places_of(recording, partition, updates)
    plans = StepPlanCache(module, units, fake_parameters, recording.recomputation)
    plans.set_partition(places.partition.stage_of_unit, placement.num_stages, places.owners, record.failure)
    return SplitModel(
        module,
        units,
        fake_parameters,
        plans,
        places.partition,
        placement,
        places.owners,
        places.direct,
        recording.num_parameters,
        record,
        recording.recomputation,
        recording.refinement,
        on_parts=recording.on_parts,
    )


@dataclass(frozen=True)
class Places:
    """Where units and parameters are.

    Attributes:
        partition: Which stage each unit is on.
        owners: Canonical parameter name to the stages that hold it, in order.
        direct: Canonical names of parameters that are kept whole, since they are used outside their unit.
    """

    partition: Partition
    owners: Mapping[str, tuple[int, ...]]
    direct: frozenset[str]


def places_of(recording: RecordedModel, partition: Partition, updates: Updates = MappingProxyType({})) -> Places:
    """Where parameters are under ``partition``, in which units that only follow others move to these.

    Args:
        recording: The model.
        partition: Which stage each unit is on.
        updates: Parameters that hooks write into, and those that they compute their new values from.
    """
    record, units, fake_parameters = recording.record, recording.units, recording.fake_parameters
    partition = _colocate_averaged_copies(recording, partition, updates)
    direct = direct_parameters(record, partition.stage_of_unit, partition.num_stages)
    owners = _owners(fake_parameters, units, record, partition, direct)
    for name, others in updates.items():
        for other in others:
            if missing := set(owners[name]) - set(owners[other]):
                direct.setdefault(other, set()).update(missing)
    in_units = set(fake_parameters.unit_of_parameters(units))
    for name in _kept_whole_with_others([updates, record.updates], direct, in_units):
        direct.setdefault(name, set())
    return Places(partition, _owners(fake_parameters, units, record, partition, direct), frozenset(direct))


def _colocate_averaged_copies(recording: RecordedModel, partition: Partition, updates: Updates) -> Partition:
    """Moves units that the step does not call (an averaged copy of the model) to the stages of what they follow."""
    called = recording.record.first_calls()
    unit_of = recording.fake_parameters.unit_of_parameters(recording.units)
    stages = dict(partition.stage_of_unit)
    for name, others in updates.items():
        unit = unit_of.get(name)
        followed = {unit_of[other] for other in others if other in unit_of}
        if unit is not None and unit not in called and len(followed) == 1:
            stages[unit] = partition.stage_of_unit[followed.pop()]
    return replace(partition, stage_of_unit=stages)


def _num_parameters(units: Mapping[str, nn.Module]) -> dict[str, int]:
    """Parameters in each unit."""
    return {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}


def _kept_whole_with_others(updates: Iterable[Updates], direct: Collection[str], in_units: Collection[str]) -> set[str]:
    """Parameters computed from, or into, others of which one is kept whole: a shard and a whole one do not mix."""
    groups = [{name, *others} for found in updates for name, others in found.items()]
    whole = set(direct)
    grew = True
    while grew:
        joined = {name for group in groups if any(n in whole or n not in in_units for n in group) for name in group}
        grew = not joined <= whole
        whole |= joined
    return whole - set(direct)


def _recorded(
    module: nn.Module,
    units: dict[str, nn.Module],
    fake_parameters: FakeParameters,
    recorded: Callable[[Mapping[str, nn.Module]], StepRecord],
    patterns: Sequence[str] | None,
    num_stages: int,
) -> tuple[dict[str, nn.Module], StepRecord]:
    """Records the step; goes a level down where units are not called as such, or are too few."""
    for _ in range(_MOST_REFINEMENTS):
        record = recorded(units)
        if patterns is not None:
            break
        finer = _finer_units(module, units, fake_parameters, record, num_stages)
        if finer is None:
            break
        units = finer
    return units, record


def _finer_units(
    module: nn.Module, units: dict[str, nn.Module], fake_parameters: FakeParameters, record: StepRecord, num_stages: int
) -> dict[str, nn.Module] | None:
    called = set(record.first_calls())
    used_directly = set(record.tail.parameters).union(*(call.reads.parameters for call in record.calls))
    for name, unit in units.items():
        children = refine_unit(name, unit)
        its_parameters = {fake_parameters.canonical_names[f"{name}.{key}"] for key, _ in unit.named_parameters()}
        if name not in called and children and its_parameters & used_directly:
            return with_refined(units, {name})
    if len(called) >= num_stages:
        return None
    in_block_lists = {child for parent in module.modules() if is_block_list(parent) for child in parent.children()}
    candidates = {
        name: refine_unit(name, units[name])
        for name in called
        if units[name] not in in_block_lists and refine_unit(name, units[name])
    }
    if not candidates:
        return None
    largest = max(candidates, key=lambda name: sum(p.numel() for p in units[name].parameters()))
    return with_refined(units, {largest})


def _owners(
    fake_parameters: FakeParameters,
    units: Mapping[str, nn.Module],
    record: StepRecord,
    partition: Partition,
    direct: Mapping[str, set[int]],
) -> dict[str, tuple[int, ...]]:
    called = set(record.first_calls())
    by_call: dict[str, set[int]] = {}
    by_place: dict[str, set[int]] = {}
    for name, unit in units.items():
        stage = partition.stage_of_unit[name]
        target = by_call if name in called else by_place
        for key, _ in unit.named_parameters(remove_duplicate=False):
            target.setdefault(fake_parameters.canonical_names[f"{name}.{key}"], set()).add(stage)
    owners: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(fake_parameters.canonical_names.values()):
        stages = by_call.get(name, set()) | direct.get(name, set()) or by_place.get(name) or {0}
        owners[name] = tuple(sorted(stages))
    return owners
