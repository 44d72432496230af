"""What a step will hold on every rank, from the record of its dry run: an estimate in bytes, before anything is built.

Six things take memory::

    parameters            as they lie between steps: whole, or this rank's shard
    gathered parameters   whole, in the dtype of computation, beside the shards while units need them
    gradients             whole, while microbatches add to them; and, once reduced, as the parameters lie
    optimizer state       as the parameters lie
    activations           a microbatch holds its saved tensors from F to I, and what weight gradients need from I to W
    edge buffers          what is received ahead of need, and what is being sent

Activations depend on the schedule: its order of F, I and W says how many microbatches a rank holds at a time. Not
counted are what an operation allocates for a moment, the workspace of collectives and the optimizer's temporaries.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import Placement, Schedule, Sharding, StageCosts
from lightning_pp.schedule.sharding import SHARDING_MODES, ShardingMode
from lightning_pp.split.partition import Partition
from lightning_pp.split.placeholders import Placeholders
from lightning_pp.split.plan import StepPlan, build_plan
from lightning_pp.split.record import HeldMemory, StepRecord


@dataclass(frozen=True)
class ParameterSize:
    """One parameter of the model.

    Attributes:
        name: Its canonical name.
        shape: Its whole shape.
        dtype: The dtype that it is kept in.
        is_trainable: Whether it requires a gradient.
        unit: The unit that holds it; None if it is used outside of one, and so never sharded.
        stages: The stages that hold it; more than one where it is shared.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool
    unit: str | None
    stages: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def is_shardable(self) -> bool:
        """Whether FSDP2 can shard it: it has rows, is of floating point and is used in its unit only."""
        return self.unit is not None and bool(self.shape) and (self.dtype.is_floating_point or self.dtype.is_complex)

    def num_elements_held(self, num_shards: int) -> int:
        """Elements that one rank keeps of it; rows are padded to a multiple of the shards."""
        if num_shards == 1 or not self.is_shardable:
            return self.num_elements
        return math.ceil(self.shape[0] / num_shards) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class StepDtypes:
    """Dtypes of a step, where they differ from those of the parameters.

    Attributes:
        compute: Dtype of the parameters inside units; None: as they are kept.
        gradient: Dtype in which microbatches accumulate and ranks reduce; None: that of the parameters.
    """

    compute: torch.dtype | None = None
    gradient: torch.dtype | None = None


@dataclass(frozen=True)
class StateMemory:
    """What stays on a rank, or on a stage of it, whatever the schedule. All in bytes.

    Attributes:
        parameters_bytes: Parameters between steps, shards where they are sharded.
        gathered_parameters_bytes: Whole parameters beside them during a step.
        gradients_bytes: Whole gradients, while microbatches accumulate.
        reduced_gradients_bytes: Gradients after the reduction, from then until they are set to zero; 0 where those
            that accumulated are reduced in place.
        optimizer_state_bytes: What the optimizer keeps of its own.
        host_bytes: With offloading, what lies on the host instead: parameters of units, their reduced gradients and
            their optimizer state, none of which the other numbers have.
    """

    parameters_bytes: int
    gathered_parameters_bytes: int
    gradients_bytes: int
    reduced_gradients_bytes: int
    optimizer_state_bytes: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What there is while microbatches run: everything but the reduced gradients."""
        return (
            self.parameters_bytes + self.gathered_parameters_bytes + self.gradients_bytes + self.optimizer_state_bytes
        )


@dataclass(frozen=True)
class StageMemory:
    """One stage. All in bytes; what a microbatch holds is for one microbatch.

    Attributes:
        stage: Number of the stage.
        rank: The rank that runs it.
        state: What does not depend on microbatches. What two stages of a rank share is in both.
        held_after_forward_bytes: Activations of one microbatch from F to I: what autograd saves, and what was received.
        held_after_input_bytes: Of one microbatch from I to W: inputs and output gradients of linear operations whose
            weight gradient is deferred.
        recomputed_bytes: What the largest checkpointed unit saves while I runs it again.
        edge_buffers_bytes: Receive buffers posted ahead, and one microbatch's sends under way.
    """

    stage: int
    rank: int
    state: StateMemory
    held_after_forward_bytes: int
    held_after_input_bytes: int
    recomputed_bytes: int
    edge_buffers_bytes: int


@dataclass(frozen=True)
class RankMemory:
    """One rank of the pipeline. All in bytes.

    Attributes:
        rank: Place in the pipeline.
        state: What does not depend on microbatches; what its stages share counts once.
        activations_bytes: The most that microbatches hold between two actions of the schedule; None without a schedule.
        recomputed_bytes: What a checkpointed unit saves while I runs it again, besides.
        edge_buffers_bytes: Receive buffers posted ahead, and sends under way.
        reduction_bytes: The flat copy of the largest unit's gradients, in which they are reduced.
    """

    rank: int
    state: StateMemory
    activations_bytes: int | None
    recomputed_bytes: int
    edge_buffers_bytes: int
    reduction_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most at any time of a step: while microbatches run, or while gradients are reduced after them."""
        running = self.state.total_bytes + (self.activations_bytes or 0) + self.recomputed_bytes
        reducing = self.state.total_bytes + self.state.reduced_gradients_bytes + self.reduction_bytes
        return max(running + self.edge_buffers_bytes, reducing)


@dataclass(frozen=True)
class MemoryEstimate:
    """What a step holds, by stage and by rank.

    Attributes:
        stages: One entry per stage.
        ranks: One entry per rank of the pipeline.
    """

    stages: tuple[StageMemory, ...]
    ranks: tuple[RankMemory, ...]

    @property
    def held_after_forward(self) -> tuple[int, ...]:
        """Bytes of one microbatch after F, per stage, as :class:`~lightning_pp.schedule.StageCosts` takes them."""
        return tuple(stage.held_after_forward_bytes for stage in self.stages)

    @property
    def held_after_input(self) -> tuple[int, ...]:
        """Bytes of one microbatch after I, per stage, likewise."""
        return tuple(stage.held_after_input_bytes for stage in self.stages)

    def activation_limits(self, limit_bytes: int) -> tuple[int, ...]:
        """What is left for activations on each rank of ``limit_bytes``: ``memory_limit`` of a search for a schedule.

        Raises:
            ConfigurationError: Nothing is left on a rank.
        """
        left = []
        for rank in self.ranks:
            rest = rank.state.total_bytes + rank.recomputed_bytes + rank.edge_buffers_bytes
            if rest >= limit_bytes:
                raise ConfigurationError(
                    f"Rank {rank.rank} of the pipeline needs {rest} bytes for parameters, gradients, optimizer state "
                    f"and buffers, and the limit is {limit_bytes} bytes: nothing is left for activations. Use more "
                    "pipeline ranks, shard over more ranks, or offload the optimizer."
                )
            left.append(limit_bytes - rest)
        return tuple(left)


def estimate_memory(
    record: StepRecord,
    partition: Partition,
    placement: Placement,
    parameters: Sequence[ParameterSize],
    *,
    optimizer_bytes_per_parameter: float = 0.0,
    dtypes: StepDtypes | None = None,
    sharding: ShardingMode = "replicate",
    num_shards: int = 1,
    unshard_budget_bytes: int | None = None,
    cpu_offload: bool = False,
    checkpointed_units: Collection[str] = (),
    schedule: Schedule | None = None,
    num_receives_ahead: int = 2,
) -> MemoryEstimate:
    """What a training step holds on every stage and rank.

    Args:
        record: A dry run of the training step on one microbatch.
        partition: Which stage each unit is on.
        placement: Which rank each stage is on.
        parameters: All parameters of the model, see :func:`parameter_sizes`.
        optimizer_bytes_per_parameter: Of the optimizer's state, see :func:`optimizer_bytes_per_parameter`.
        dtypes: Dtypes of computation and of gradients; by default those of the parameters.
        sharding: ``replicate``: all parameters whole on every rank. ``shard_grad_op``: sharded between steps, gathered
            during a step. ``full_shard``: sharded, and gathered a few units at a time. Gradients accumulate whole in
            all of them and are sharded when they are reduced.
        num_shards: Ranks that share the parameters of a stage; 1 with ``replicate``.
        unshard_budget_bytes: With ``full_shard``, what gathered parameters may take; by default what training chooses,
            see :meth:`~lightning_pp.schedule.sharding.Sharding.budget_of`.
        cpu_offload: Whether what is sharded lies on the host between its uses.
        checkpointed_units: Units that keep their inputs only and run again in I, besides those that the record names.
        schedule: The order of actions; without it the activations of a whole step are not known.
        num_receives_ahead: Messages that are received ahead of the next one, for each sender.

    Raises:
        ConfigurationError: ``sharding`` is unknown, ``num_shards`` is below 1, or above 1 with ``replicate``, which
            cannot be offloaded either.
        ScheduleError: ``schedule`` is for another number of stages.
    """
    if sharding not in SHARDING_MODES:
        raise ConfigurationError(f"sharding={sharding!r}; it must be one of {', '.join(SHARDING_MODES)}")
    if num_shards < 1 or (num_shards > 1 and sharding == "replicate"):
        raise ConfigurationError(
            f"num_shards={num_shards} with sharding={sharding!r}; it must be at least 1, and 1 if parameters are whole"
        )
    if cpu_offload and sharding == "replicate":
        raise ConfigurationError("cpu_offload=True with sharding='replicate'; only what is sharded can be offloaded")
    state = _StateSizes(
        dtypes or StepDtypes(), sharding, num_shards, unshard_budget_bytes, optimizer_bytes_per_parameter, cpu_offload
    )
    plan = build_plan(record, partition.stage_of_unit, partition.num_stages)
    stages = []
    for stage in range(partition.num_stages):
        activations = _Activations.of(plan, stage, record.recomputed_units.union(checkpointed_units))
        stages.append(
            StageMemory(
                stage,
                placement.rank_of_stage[stage],
                state.of([parameter for parameter in parameters if stage in parameter.stages], [stage]),
                activations.after_forward,
                activations.after_input,
                activations.recomputed,
                _edge_buffers(plan, placement, [stage], num_receives_ahead),
            )
        )
    held = StageCosts(
        forward=0.0,
        backward_input=0.0,
        backward_weight=0.0,
        held_after_forward=[stage.held_after_forward_bytes for stage in stages],
        held_after_input=[stage.held_after_input_bytes for stage in stages],
    )
    peaks = None if schedule is None else schedule.simulate(held).peak_memory
    ranks = []
    for rank in range(placement.num_ranks):
        own = placement.stages_of_rank(rank)
        here = [parameter for parameter in parameters if not set(own).isdisjoint(parameter.stages)]
        ranks.append(
            RankMemory(
                rank,
                state.of(here, own),
                None if peaks is None else round(peaks[rank]),
                max(stages[stage].recomputed_bytes for stage in own),
                _edge_buffers(plan, placement, own, num_receives_ahead),
                state.flat_gradients_of(here),
            )
        )
    return MemoryEstimate(tuple(stages), tuple(ranks))


def parameter_sizes(
    placeholders: Placeholders,
    units: Mapping[str, nn.Module],
    owners: Mapping[str, Sequence[int]],
    direct: Collection[str] = (),
) -> tuple[ParameterSize, ...]:
    """The parameters of a model, for :func:`estimate_memory`; real, fake and meta ones alike.

    Args:
        placeholders: Those of the model.
        units: Its units.
        owners: Canonical parameter name to the stages that hold it.
        direct: Canonical names of parameters that are used outside their unit.
    """
    unit_of: dict[str, str] = {}
    for unit in units:
        for name, canonical in placeholders.canonical_names.items():
            if name.startswith(f"{unit}.") or not unit:
                unit_of.setdefault(canonical, unit)
    sizes = []
    for name, stages in owners.items():
        parameter = placeholders.names[name]
        unit_name = None if name in direct else unit_of.get(name)
        sizes.append(
            ParameterSize(
                name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, unit_name, tuple(stages)
            )
        )
    return tuple(sizes)


def optimizer_bytes_per_parameter(
    optimizer: Optimizer | type[Optimizer], dtype: torch.dtype = torch.float32, **options: Any
) -> float:
    """Bytes of state that an optimizer keeps for each element of a parameter, found by stepping a small parameter.

    States that do not grow with the parameter (a step count) do not count. A state that grows slower (Adafactor keeps
    rows and columns) counts as it is for a square of 64 × 64.

    Args:
        optimizer: An optimizer, which is left as it is, or a class.
        dtype: Dtype of the parameters.
        options: The options of a class.

    Raises:
        ConfigurationError: It cannot be stepped with one gradient, as one that needs a closure (LBFGS).
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    parameter = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    try:
        if isinstance(optimizer, Optimizer):
            made = copy.copy(optimizer)
            group = optimizer.param_groups[0] if optimizer.param_groups else optimizer.defaults
            made.param_groups = [{**group, "params": [parameter], "param_names": ["lone"]}]
            made.state = defaultdict(dict)
        else:
            made = optimizer([parameter], **options)
        made.step()
    except Exception as error:
        raise ConfigurationError(
            f"{kind.__name__} cannot be stepped on a lone parameter with a gradient ({type(error).__name__}: {error}), "
            "so the size of its state is not known: give optimizer_bytes_per_parameter as a number."
        ) from error
    state = made.state.get(parameter, {})
    held = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    return sum(value.untyped_storage().nbytes() for value in held) / parameter.numel()


@dataclass(frozen=True)
class _StateSizes:
    """Bytes of parameters and of what there is one of per parameter."""

    dtypes: StepDtypes
    sharding: ShardingMode
    num_shards: int
    unshard_budget_bytes: int | None
    optimizer_bytes: float
    cpu_offload: bool

    def of(self, parameters: Iterable[ParameterSize], stages: Collection[int]) -> StateMemory:
        parameters = list(parameters)
        trainable = [parameter for parameter in parameters if parameter.is_trainable]
        gathered = [parameter for parameter in parameters if self._is_gathered(parameter)]
        offloaded = set(gathered) if self.cpu_offload else set()
        on_device = [parameter for parameter in parameters if parameter not in offloaded]
        return StateMemory(
            parameters_bytes=self._kept(on_device),
            gathered_parameters_bytes=self._gathered_at_a_time(gathered, stages),
            gradients_bytes=sum(p.num_elements * self._gradient_dtype(p).itemsize for p in trainable),
            reduced_gradients_bytes=self._reduced(on_device),
            optimizer_state_bytes=self._optimizer_state(on_device),
            host_bytes=self._kept(offloaded) + self._reduced(offloaded) + self._optimizer_state(offloaded),
        )

    def _kept(self, parameters: Iterable[ParameterSize]) -> int:
        return sum(p.num_elements_held(self.num_shards) * p.dtype.itemsize for p in parameters)

    def _reduced(self, parameters: Iterable[ParameterSize]) -> int:
        return self._kept(p for p in parameters if p.is_trainable and self._is_gathered(p))

    def _optimizer_state(self, parameters: Iterable[ParameterSize]) -> int:
        num_elements = sum(p.num_elements_held(self.num_shards) for p in parameters if p.is_trainable)
        return round(num_elements * self.optimizer_bytes)

    def flat_gradients_of(self, parameters: Iterable[ParameterSize]) -> int:
        """The largest unit's gradients, padded to whole shards."""
        units: dict[str | None, int] = {}
        for p in parameters:
            if p.is_trainable and self._is_gathered(p):
                num_bytes = p.num_elements_held(self.num_shards) * self.num_shards * self._gradient_dtype(p).itemsize
                units[p.unit] = units.get(p.unit, 0) + num_bytes
        return max(units.values(), default=0)

    def _is_gathered(self, parameter: ParameterSize) -> bool:
        """Whether what units compute with is another tensor than what is kept between steps."""
        return parameter.is_shardable and (
            self.sharding != "replicate" or self.dtypes.compute not in (None, parameter.dtype)
        )

    def _gathered_at_a_time(self, parameters: Iterable[ParameterSize], stages: Collection[int]) -> int:
        units: dict[str, int] = {}
        units_of_stages: dict[int, set[str]] = {stage: set() for stage in stages}
        for p in parameters:
            assert p.unit is not None  # what no unit holds is not gathered
            dtype = self.dtypes.compute if self.dtypes.compute and p.dtype.is_floating_point else p.dtype
            num_bytes = p.num_elements_held(self.num_shards) * self.num_shards * dtype.itemsize
            units[p.unit] = units.get(p.unit, 0) + num_bytes
            for stage in set(p.stages) & units_of_stages.keys():
                units_of_stages[stage].add(p.unit)
        whole = sum(units.values())
        if self.sharding != "full_shard" or not units:
            return whole
        held = tuple(tuple(own) for own in units_of_stages.values())
        budget = Sharding("full_shard", held, units, self.unshard_budget_bytes).budget_of(range(len(held)))
        return min(whole, max(budget, max(units.values())))

    def _gradient_dtype(self, parameter: ParameterSize) -> torch.dtype:
        return self.dtypes.gradient or parameter.dtype


@dataclass(frozen=True)
class _Activations:
    """What one microbatch holds on one stage, in bytes."""

    after_forward: int
    after_input: int
    recomputed: int

    @classmethod
    def of(cls, plan: StepPlan, stage: int, checkpointed: Collection[str]) -> _Activations:
        record = plan.record
        saved: dict[int, int] = {}
        queued: dict[int, int] = {}
        gradients = recomputed = 0
        regions: set[int | None] = set()  # a checkpointed region keeps what its first unit is given
        for memory in _code_between_units(plan, stage):
            saved.update(memory.saved)
            queued.update(memory.queued)
            gradients += memory.queued_gradients_bytes
        for index in sorted(plan.stages[stage].owned_calls):
            call = record.calls[index]
            queued.update(call.memory.queued)
            gradients += call.memory.queued_gradients_bytes
            if (call.unit in checkpointed or call.region is not None) and call.memory.saved:
                if call.region is None or call.region not in regions:
                    saved.update(call.given)
                regions.add(call.region)
                held = dict(call.given)
                if call.unit in checkpointed:
                    held.update(call.memory.saved_by_policy)
                    saved.update(call.memory.saved_by_policy)
                own = (num_bytes for memory, num_bytes in call.memory.saved.items() if memory not in held)
                recomputed = max(recomputed, sum(own))
            else:
                saved.update(call.memory.saved)
        for edge in plan.stages[stage].receives:
            memory_of_value = record.leaf(edge.value).memory
            if edge.has_gradient and memory_of_value is not None:
                saved[memory_of_value] = edge.spec.num_bytes
        after_input = sum(queued.values()) + gradients
        return cls(sum(saved.values()), after_input, recomputed)


def _code_between_units(plan: StepPlan, stage: int) -> Iterator[HeldMemory]:
    for index in sorted(plan.stages[stage].owned_calls):
        yield plan.record.calls[index].reads.memory
    if stage == len(plan.stages) - 1:
        yield plan.record.tail.memory


def _edge_buffers(plan: StepPlan, placement: Placement, stages: Sequence[int], num_ahead: int) -> int:
    """Bytes of the next message of every channel and those posted ahead, and of what leaves for one microbatch."""
    rank_of_stage = placement.rank_of_stage
    incoming: dict[int, list[int]] = {}
    outgoing = 0
    for edge in plan.edges:
        source, target = rank_of_stage[edge.source], rank_of_stage[edge.target]
        if source == target:
            continue
        for is_gradient in (False, True) if edge.has_gradient else (False,):
            receiver_stage, sender = (edge.source, target) if is_gradient else (edge.target, source)
            sender_stage = edge.target if is_gradient else edge.source
            if receiver_stage in stages:
                incoming.setdefault(sender, []).append(edge.spec.num_bytes)
            if sender_stage in stages:
                outgoing += edge.spec.num_bytes
    # messages of several microbatches are under way: the largest ones stand for those
    posted = sum(
        sum(sorted(messages * num_ahead, reverse=True)[:num_ahead]) + max(messages) for messages in incoming.values()
    )
    return posted + outgoing
