"""Estimates the memory of a step on every rank, in bytes, from the record of its dry run, before anything is built.

Six things take memory::

    parameters            as they lie between steps: whole, or this rank's shard
    gathered parameters   whole, in the dtype of computation, beside the shards while units need them
    gradients             whole, while microbatches add to them; and, once reduced, as the parameters lie
    optimizer state       as the parameters lie
    activations           a microbatch holds its saved tensors from F to I, and what weight gradients need from I to W
    edge buffers          what is received ahead of need, and what is being sent

Activations depend on the schedule: its order of F, I and W says how many microbatches a rank holds at a time. If the
loss needs the whole batch, that is all of them, and the last stage also has the values that the code after the last
unit gets joined, with their gradients. Not counted are what an operation allocates for a moment, the workspace of
collectives and the optimizer's temporaries; nor, with such a loss, that a matrix of all pairs of samples grows faster
than the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_pp.schedule import Placement, Schedule, StageCosts
from lightning_pp.schedule.simulation.memory import peaks_of
from lightning_pp.schedule.simulation.messages import message_peaks
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.memory.activation_memory import Activations, joined_bytes, message_bytes, sent_bytes
from lightning_pp.split.memory.state_memory import ParameterSize, StateMemory, StateSizes
from lightning_pp.split.record.plan import StepPlan, build_plan
from lightning_pp.split.record.step_record import StepRecord


@dataclass(frozen=True)
class StageMemory:
    """One stage, in bytes; the memory of a microbatch is for one microbatch.

    Attributes:
        stage: Number of the stage.
        rank: The rank that runs it.
        parameters: Those that it holds.
        sizes: Counts them.
        held_after_forward_bytes: Activations of one microbatch from F to I: what autograd saves, and what was received;
            with ``whole_batch_loss`` its part of what is joined, too.
        offloadable_bytes: Of ``held_after_forward_bytes``, what may wait on the host.
        held_after_input_bytes: Of one microbatch from I to W: inputs and output gradients of linear operations whose
            weight gradient is deferred.
        recomputed_bytes: What the largest checkpointed unit saves while I runs it again.
        edge_buffers_bytes: Receive buffers posted ahead, and sends that are not released yet.
        sent_bytes: Values of one microbatch that go to other ranks, and are kept until their gradients come back.
    """

    stage: int
    rank: int
    parameters: Sequence[ParameterSize]
    sizes: StateSizes
    held_after_forward_bytes: int
    offloadable_bytes: int
    held_after_input_bytes: int
    recomputed_bytes: int
    edge_buffers_bytes: int
    sent_bytes: int

    @cached_property
    def state(self) -> StateMemory:
        """What does not depend on microbatches. What two stages of a rank share is in both."""
        return self.sizes.of(self.parameters, [self.stage])


@dataclass(frozen=True)
class RankMemory:
    """One rank of the pipeline. All in bytes.

    Attributes:
        rank: Place in the pipeline.
        state: What does not depend on microbatches; what its stages share counts once.
        activations_bytes: Peak of microbatches between two actions of the schedule; None without a schedule.
        recomputed_bytes: What a checkpointed unit saves while I runs it again, besides.
        edge_buffers_bytes: Receive buffers posted ahead, and sends that are not released yet.
        reduction_bytes: The flat copy of the largest unit's gradients for their reduction.
        communicators_bytes: Buffers of collectives, on a device.
    """

    rank: int
    state: StateMemory
    activations_bytes: int | None
    recomputed_bytes: int
    edge_buffers_bytes: int
    reduction_bytes: int
    communicators_bytes: int = 0

    @property
    def bytes_beside_activations(self) -> int:
        """The memory of a running step besides what microbatches hold between two actions."""
        return self.state.total_bytes + self.communicators_bytes + self.recomputed_bytes + self.edge_buffers_bytes

    @property
    def running_bytes(self) -> int:
        """What there is while microbatches run, besides the state."""
        return (self.activations_bytes or 0) + self.recomputed_bytes + self.edge_buffers_bytes

    @property
    def reducing_bytes(self) -> int:
        """What there is while gradients are reduced after them, besides the state."""
        return self.state.reduced_gradients_bytes + self.reduction_bytes

    @property
    def peak_bytes(self) -> int:
        """All together, at the worst of the two times."""
        return self.state.total_bytes + self.communicators_bytes + max(self.running_bytes, self.reducing_bytes)


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a step, by stage and by rank.

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


def estimate_memory(
    record: StepRecord,
    partition: Partition,
    placement: Placement,
    parameters: Sequence[ParameterSize],
    state: StateSizes | None = None,
    *,
    schedule: Schedule | None = None,
    whole_batch_loss: bool = False,
) -> MemoryEstimate:
    """The memory of a training step on every stage and rank.

    Args:
        record: A dry run of the training step on one microbatch.
        partition: Which stage each unit is on.
        placement: Which rank each stage is on.
        parameters: All parameters of the model, see :func:`parameter_sizes`.
        state: Counts what is kept of them; by default whole parameters and gradients, and no optimizer.
        schedule: The order of actions; without it the activations of a whole step are not known.
        whole_batch_loss: Whether the code after the last unit runs once, on all microbatches joined.

    Raises:
        ScheduleError: ``schedule`` is for another number of stages.
    """
    state = state or StateSizes()
    if whole_batch_loss:
        record = replace(record, outputs_cross_alone=True)
    plan = build_plan(record, partition.stage_of_unit, partition.num_stages)
    joined = [0] * partition.num_stages
    if whole_batch_loss:
        joined[-1] = joined_bytes(record)
    stages = tuple(
        _stage_memory(plan, stage, placement, parameters, state, joined[stage]) for stage in range(partition.num_stages)
    )
    peaks: Sequence[int | None] = [None] * placement.num_ranks
    if schedule is None:
        messages = [
            message_bytes(plan, placement, placement.stages_of_rank(rank)) for rank in range(placement.num_ranks)
        ]
    else:
        peaks = _activations(stages, schedule)
        sizes = [(edge.spec.sent_bytes(record.num_tensor_ranks), edge.spec.num_bytes) for edge in plan.edges]
        edges = zip(plan.edges, sizes, strict=True)
        messages = [*message_peaks(schedule, [(e.source, e.target, *size, e.has_gradient) for e, size in edges])]
    ranks = []
    for rank in range(placement.num_ranks):
        own = placement.stages_of_rank(rank)
        any_of_them = set(own)
        here = [parameter for parameter in parameters if not any_of_them.isdisjoint(parameter.stages)]
        ranks.append(
            RankMemory(
                rank,
                state.of(here, own),
                peaks[rank],
                max(stages[stage].recomputed_bytes for stage in own),
                messages[rank],
                state.flat_gradients_of(here),
            )
        )
    return MemoryEstimate(stages, tuple(ranks))


def _stage_memory(
    plan: StepPlan,
    stage: int,
    placement: Placement,
    parameters: Sequence[ParameterSize],
    state: StateSizes,
    joined: int,
) -> StageMemory:
    activations = Activations.of(plan, stage, plan.record.recomputed_units)
    return StageMemory(
        stage,
        placement.rank_of_stage[stage],
        [parameter for parameter in parameters if stage in parameter.stages],
        state,
        activations.after_forward + joined,
        activations.offloadable,
        activations.after_input,
        activations.recomputed,
        message_bytes(plan, placement, [stage]),
        sent_bytes(plan, placement, stage),
    )


def _activations(stages: Sequence[StageMemory], schedule: Schedule) -> list[int]:
    """The most bytes that microbatches hold on each rank under ``schedule``."""
    held = StageCosts(
        forward=0.0,
        backward_input=0.0,
        backward_weight=0.0,
        held_after_forward=[stage.held_after_forward_bytes for stage in stages],
        held_after_input=[stage.held_after_input_bytes for stage in stages],
        held_on_host=[stage.offloadable_bytes for stage in stages],
    )
    return list(map(round, peaks_of(schedule, held)))
