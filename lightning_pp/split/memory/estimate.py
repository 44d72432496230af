"""What a step will hold on every rank, from the record of its dry run: an estimate in bytes, before anything is built.

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

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import Placement, Schedule, StageCosts
from lightning_pp.schedule.sharding import SHARDING_MODES, ShardingMode
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.memory.activation_memory import Activations, edge_buffers, joined_bytes
from lightning_pp.split.memory.state_memory import ParameterSize, StateMemory, StateSizes, StepDtypes
from lightning_pp.split.record.plan import build_plan
from lightning_pp.split.record.step_record import StepRecord


@dataclass(frozen=True)
class StageMemory:
    """One stage. All in bytes; what a microbatch holds is for one microbatch.

    Attributes:
        stage: Number of the stage.
        rank: The rank that runs it.
        state: What does not depend on microbatches. What two stages of a rank share is in both.
        held_after_forward_bytes: Activations of one microbatch from F to I: what autograd saves, and what was received;
            with ``whole_batch_loss`` its part of what is joined, too.
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
    whole_batch_loss: bool = False,
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
        whole_batch_loss: Whether the code after the last unit runs once, on all microbatches joined.

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
    state = StateSizes(
        dtypes or StepDtypes(), sharding, num_shards, unshard_budget_bytes, optimizer_bytes_per_parameter, cpu_offload
    )
    plan = build_plan(record, partition.stage_of_unit, partition.num_stages)
    stages = []
    for stage in range(partition.num_stages):
        activations = Activations.of(plan, stage, record.recomputed_units.union(checkpointed_units))
        joined = joined_bytes(record) if whole_batch_loss and stage == partition.num_stages - 1 else 0
        stages.append(
            StageMemory(
                stage,
                placement.rank_of_stage[stage],
                state.of([parameter for parameter in parameters if stage in parameter.stages], [stage]),
                activations.after_forward + joined,
                activations.after_input,
                activations.recomputed,
                edge_buffers(plan, placement, [stage], num_receives_ahead),
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
                edge_buffers(plan, placement, own, num_receives_ahead),
                state.flat_gradients_of(here),
            )
        )
    return MemoryEstimate(tuple(stages), tuple(ranks))
