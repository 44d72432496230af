"""Gathers and reductions of data-parallel ranks in a step, and how much they lengthen it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.planning.hardware.links import Links
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import Schedule, Sharding, StageCosts, insert_sharding
from lightning_pp.schedule.sharding import unit_plan, unit_uses
from lightning_pp.split.memory.state_memory import ParameterSize, StateSizes


@dataclass(frozen=True)
class Collectives:
    """Gathers and reductions of the data-parallel ranks of each stage.

    Attributes:
        sharding: What is gathered, for :func:`insert_sharding`.
        gather: For each stage, milliseconds of gathering it once.
        reduce: For each stage, milliseconds of reducing its gradients.
    """

    sharding: Sharding
    gather: tuple[float, ...]
    reduce: tuple[float, ...]

    @classmethod
    def of(cls, split: SplitModel, model: MemoryModel, sizes: ParallelSizes, links: Links) -> Collectives:
        """Those of the stages of ``split``, in rings.

        A rank receives b (n - 1) / n in a gather or a reduce-scatter of b bytes among n, twice that in an all-reduce.

        Args:
            split: The stages.
            model: Says what is sharded, and in which dtypes.
            sizes: Of the mesh.
            links: What messages take. Of a group with ranks on several nodes, all wait for the links between these.
        """
        state, num_stages = model.state, split.placement.num_stages
        parameters = split.parameter_sizes
        among_shards = links.between_neighbours(state.num_shards * sizes.tensor)
        among_all = links.between_neighbours(sizes.data_parallel * sizes.tensor)
        gather, scatter, copies = [0.0] * num_stages, [0.0] * num_stages, [0.0] * num_stages
        num_bytes: dict[str, int] = {}
        for parameter in parameters:
            whole = _gathered_bytes(parameter, state)
            if whole and parameter.unit is not None:
                num_bytes[parameter.unit] = num_bytes.get(parameter.unit, 0) + whole
            for stage in parameter.stages:
                gather[stage] += whole * (1 - 1 / state.num_shards)
                over_shards, over_copies = _reduced_bytes(parameter, state, sizes.data_parallel)
                scatter[stage] += over_shards
                copies[stage] += over_copies
        units = [
            tuple(
                call.unit
                for call in split.record.calls
                if call.unit in num_bytes and split.partition.stage_of_unit[call.unit] == stage
            )
            for stage in range(num_stages)
        ]
        sharding = Sharding(state.sharding, tuple(units), num_bytes, state.unshard_budget)
        reduce = (among_shards.ms(one) + among_all.ms(other) for one, other in zip(scatter, copies, strict=True))
        return cls(sharding, tuple(map(among_shards.ms, gather)), tuple(reduce))

    def time_in_a_row(self, schedule: Schedule, costs: StageCosts, without: float) -> float:
        """The time of a step in a row of steps with gathers and reductions, milliseconds.

        They run one after the other beside the computation of their rank; a rank begins the next step when its last
        reduction has ended and its first stage is gathered again. A rank that gathers unit by unit computes with one
        unit while it gathers the next, so that its F and I take the longer of the two. What is gained where the last
        backward of a stage is split for its reduction does not count: the time is never below that without them.

        Args:
            schedule: The programs.
            costs: Of the stages, without gathers and reductions.
            without: The time without them.
        """
        sharded = insert_sharding(schedule, self.sharding)
        gather = list(self.gather)
        resolved = costs.per_stage(schedule.placement.num_stages)
        forward, backward_input = list(resolved.forward), list(resolved.backward_input)
        for rank in range(schedule.placement.num_ranks):
            share = _gathered_share(sharded, self.sharding, rank)
            for stage in schedule.placement.stages_of_rank(rank) if share is not None else ():
                one_use, gather[stage] = gather[stage] * (share or 0.0), 0.0
                forward[stage] = max(forward[stage], one_use)
                backward_input[stage] = max(backward_input[stage], one_use)
        with_them = replace(costs, forward=forward, backward_input=backward_input, gather=gather, reduce=self.reduce)
        simulation = sharded.simulate(with_them)
        longest = without
        for program, starts, ends in zip(simulation.programs, simulation.start_ms, simulation.end_ms, strict=True):
            # from the gather of the rank's first stage, as late as it may be
            first = next(place for place, action in enumerate(program) if action.kind.is_compute)
            longest = max(longest, max(ends) - starts[first] + gather[program[first].stage])
        return longest


def _gathered_share(schedule: Schedule, sharding: Sharding, rank: int) -> float | None:
    """What part of a stage's units a rank gathers for a use of it, on average; None if it gathers whole stages."""
    plan = unit_plan(schedule, sharding, rank)
    if plan is None:
        return None
    num_units = sum(len(set(units)) for _, units in unit_uses(schedule.programs[rank], sharding))
    return plan.gathers.num_gathers / num_units if num_units else 0.0


def _gathered_bytes(parameter: ParameterSize, state: StateSizes) -> int:
    """Of a parameter when it is gathered; 0 if nobody sends anything for it."""
    if not parameter.is_shardable or state.sharding == "replicate":
        return 0
    dtype = state.dtypes.compute if state.dtypes.compute and parameter.dtype.is_floating_point else parameter.dtype
    return parameter.num_elements_held(state.num_shards) * state.num_shards * dtype.itemsize


def _reduced_bytes(parameter: ParameterSize, state: StateSizes, num_replicas: int) -> tuple[float, float]:
    """What a rank receives for a parameter when gradients are reduced: over the shards, then over copies of a shard."""
    if not parameter.is_trainable:
        return 0.0, 0.0
    num_bytes = parameter.num_elements * (state.dtypes.gradient or parameter.dtype).itemsize
    num_shards = state.num_shards if parameter.is_shardable else 1
    num_copies = num_replicas // num_shards
    return num_bytes * (1 - 1 / num_shards), 2 * (1 - 1 / num_copies) * num_bytes / num_shards
