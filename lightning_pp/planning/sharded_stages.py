"""The units of this rank, sharded by the strategy's ``sharding=``, and programs with gathers and reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.meshes import replicating
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import Schedule, Sharding, insert_sharding
from lightning_pp.schedule.fewer_microbatches import keep_first_microbatches
from lightning_pp.schedule.sharding import SHARDING_MODES, ShardingMode, UnitPlan, unit_plan
from lightning_pp.sharding.fsdp import ShardedUnits
from lightning_pp.sharding.replicated_units import ReplicatedUnits
from lightning_pp.sharding.stages import ShardedStages
from lightning_pp.sharding.units.collective_times import CollectiveClock
from lightning_pp.split.memory.state_memory import StepDtypes


@dataclass(frozen=True)
class ShardingSettings:
    """The strategy's arguments about sharding.

    Attributes:
        mode: See :mod:`lightning_pp.schedule.sharding`.
        unshard_budget: With ``full_shard``, the most bytes of gathered parameters on a rank at any time; None chooses.
        cpu_offload: Keep what is sharded on the host between steps.
        replicate_size: How many of the data-parallel ranks hold the same shards.

    Raises:
        ConfigurationError: The mode is unknown, or has no use for another argument.
    """

    mode: ShardingMode = "shard_grad_op"
    unshard_budget: int | None = None
    cpu_offload: bool = False
    replicate_size: int = 1

    def __post_init__(self) -> None:
        if self.mode not in SHARDING_MODES:
            raise ConfigurationError(f"sharding={self.mode!r} is unknown: choose one of {', '.join(SHARDING_MODES)}.")
        if self.mode == "replicate" and self.replicate_size != 1:
            raise ConfigurationError(
                f"data_parallel_replicate_size={self.replicate_size} shards within groups of replicas, but "
                "sharding='replicate' shards nothing. Leave it at 1, or choose shard_grad_op or full_shard."
            )
        if not isinstance(self.cpu_offload, bool):
            raise ConfigurationError(f"cpu_offload={self.cpu_offload!r} must be True or False.")
        if self.cpu_offload and self.mode == "replicate":
            raise ConfigurationError(
                "cpu_offload=True keeps shards on the host and gathers them for a step, but sharding='replicate' "
                "keeps whole parameters on every device. Choose shard_grad_op or full_shard, which also work with "
                "one replica, or leave cpu_offload out."
            )
        budget = self.unshard_budget
        if budget is None:
            return
        if self.mode != "full_shard":
            raise ConfigurationError(
                f"unshard_budget={budget} limits the memory of gathered parameters in sharding='full_shard', but "
                f"sharding={self.mode!r} has no such limit. Leave out unshard_budget, or choose full_shard."
            )
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise ConfigurationError(f"unshard_budget={budget!r} must be a number of bytes, at least 1, or None.")

    def replaces_parameters(self, dtypes: StepDtypes) -> bool:
        """Whether units compute with other tensors than those that are kept between steps."""
        return self.mode != "replicate" or dtypes.compute is not None


def make_units(
    settings: ShardingSettings,
    units: dict[str, nn.Module],
    mesh: DeviceMesh,
    direct: list[nn.Parameter],
    dtypes: StepDtypes,
    before_sharding: Callable[[Mapping[str, nn.Module]], None],
    clock: CollectiveClock,
) -> ShardedUnits | ReplicatedUnits:
    """This rank's units, sharded or whole.

    Args:
        settings: How.
        units: The units of the rank's stages.
        mesh: (shard) or (replicate, shard).
        direct: Parameters used outside their unit, which stay whole: nobody would gather them there.
        dtypes: Of computation and of gradients, where they differ from the parameters'.
        before_sharding: Gives the parameters of units memory and values.
        clock: Times gathers and reductions.
    """
    if not settings.replaces_parameters(dtypes):
        return ReplicatedUnits(units, mesh.get_group(), replicated=direct, dtype=dtypes.gradient, clock=clock)
    return ShardedUnits(
        units,
        # whole parameters that are computed with in another dtype are one shard, gathered by a cast
        mesh=replicating(mesh) if settings.mode == "replicate" else mesh,
        # activations are cast by who knows what depends on weights, see lightning_pp.split.unit_calls.compute_dtype
        mp_policy=MixedPrecisionPolicy(dtypes.compute, dtypes.gradient, cast_forward_inputs=False),
        replicated=direct,
        reshard_after_use=settings.mode == "full_shard",
        cpu_offload=settings.cpu_offload,
        before_sharding=before_sharding,
        clock=clock,
    )


class ShardedPrograms:
    """Programs with the gathers and reductions of this rank's units, and the object that executes them.

    Replicas have to gather and reduce in the same order, so all run the program of the one with the most microbatches,
    and leave out what they have not.

    Args:
        settings: The strategy's.
        split: The split model.
        units: Those of this rank.
        rank: This rank's place in the pipeline.
        groups: Who has to agree.
        clock: Times gathers and reductions.

    Raises:
        ConfigurationError: A unit does not fit the budget; on every rank of the pipeline.
    """

    def __init__(
        self,
        settings: ShardingSettings,
        split: SplitModel,
        units: ShardedUnits | ReplicatedUnits,
        rank: int,
        groups: ControlGroups,
        clock: CollectiveClock,
    ) -> None:
        stages = split.placement.stages_of_rank(rank)
        calls = _calls_of_any_replica(split, groups)
        called = {stage: [unit for unit in calls if split.partition.stage_of_unit[unit] == stage] for stage in stages}
        units_of_stage = {stage: split.partition.units_of_stage(stage) for stage in stages}
        self.stages = ShardedStages(units, units_of_stage, called, clock)
        self.sharding = _describe(settings, called, units, groups.gather_in_pipeline, split.placement.num_stages)
        self.sharding.check()
        # with one stage on a rank, and all gathers at the start, there is one order only
        self._order_depends = settings.mode == "full_shard" or len(stages) > 1
        self._rank, self._groups, self._is_ragged = rank, groups, False
        self._programs: dict[tuple[int, int, bool], tuple[Schedule, Schedule, UnitPlan | None]] = {}

    def most_microbatches(self, number: int, *, reduce: bool) -> int:
        """The most microbatches of any replica, where the program depends on it; every replica has to call it."""
        group = self._groups.data_parallel
        if group is None or not self._order_depends or not (reduce or self.sharding.mode == "full_shard"):
            return number
        extremes = torch.tensor([number, -number])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        most, negated_least = extremes.tolist()
        self._is_ragged = most != -negated_least
        return int(most)

    def begin(self, schedule: Schedule, number: int, *, reduce: bool) -> Schedule:
        """Gets ready for a batch of ``number`` microbatches.

        Args:
            schedule: Programs for as many microbatches as :meth:`most_microbatches` said.
            number: The microbatches of this replica.
            reduce: Whether gradients are reduced in this batch.

        Returns:
            What to run.
        """
        key = (id(schedule), number, reduce)
        if key not in self._programs:
            sharded = insert_sharding(schedule, self.sharding, reduces=reduce and not schedule.forward_only)
            plan = unit_plan(sharded, self.sharding, self._rank)
            # the schedule is kept with it, so that its id stays its own
            self._programs[key] = schedule, keep_first_microbatches(sharded, number), plan
        _, program, plan = self._programs[key]
        self.stages.begin(program.programs[self._rank], plan, is_ragged=self._is_ragged)
        return program


def _calls_of_any_replica(split: SplitModel, groups: ControlGroups) -> list[str]:
    """The units in the order of their calls, with those that only another replica, or another batch, may call.

    What a replica draws, and the values in its batch, may have it call units that the recorded step did not. All gather
    these, and in one order: that of the first replica's record, with the others where their places in the module say.
    """
    record = split.record
    calls = [call.unit for call in record.calls]
    may_differ = record.may_branch_at_random or record.depends_on_batch_values
    of_replicas = groups.gather((calls, may_differ), "the units that a step calls")
    calls = of_replicas[0][0]
    if not any(may_differ or others != calls for others, may_differ in of_replicas):
        return calls
    called, place = set(calls), 0
    for unit in split.units:
        if unit in called:
            place = max(index for index, other in enumerate(calls) if other == unit) + 1
        else:
            calls.insert(place, unit)
            place += 1
    return calls


def _describe(
    settings: ShardingSettings,
    called: dict[int, list[str]],
    units: ShardedUnits | ReplicatedUnits,
    gather_in_pipeline: Callable[[Any], list[Any]],
    num_stages: int,
) -> Sharding:
    """What all ranks of the pipeline gather, and how large it is."""
    if settings.mode == "replicate" or isinstance(units, ReplicatedUnits):
        return Sharding(settings.mode, ((),) * num_stages, {})
    own = {
        stage: tuple(name for unit in names if (name := units.gathered_as(unit)) is not None)
        for stage, names in called.items()
    }
    stages: dict[int, tuple[str, ...]] = {}
    num_bytes: dict[str, int] = {}
    for its_stages, its_bytes in gather_in_pipeline((own, units.gathered_bytes())):
        stages.update(its_stages)
        num_bytes.update(its_bytes)
    return Sharding(
        settings.mode, tuple(stages[stage] for stage in range(num_stages)), num_bytes, settings.unshard_budget
    )
