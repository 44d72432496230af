"""The facts of the plan that a diagnosis needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.planning.cuts import best_partition
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.schedules.source import FromFile
from lightning_pp.planning.stage_costs import assumed_speed, held_gib
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import Schedule, StageCosts
from lightning_pp.split.cut.unit_costs import UnitCost, estimate_unit_costs
from lightning_pp.telemetry.diagnosis.evidence import PlanFacts
from lightning_pp.telemetry.diagnosis.weights import product_weights


def plan_facts(split: SplitModel, options: PipelineOptions, memory: DeviceMemory | None, device_type: str) -> PlanFacts:
    """The facts of a model that is cut.

    Args:
        split: The model.
        options: What the user says.
        memory: What a rank may hold altogether; None for no limit.
        device_type: Of the device that computes.
    """
    record, num_parameters = split.counted.record, split.counted.num_parameters
    partition, placement = split.partition, split.placement
    flops = estimate_unit_costs(record, num_parameters)
    whole_batch_loss = options.schedule.whole_batch_loss
    after_forward, after_input = held_gib(record, partition, placement, whole_batch_loss=whole_batch_loss)

    def cut_again(units: Mapping[str, UnitCost], speeds: Sequence[float], program: Schedule) -> list[list[str]] | None:
        cut = replace(options.cut, split_points=None, unit_weights=None, rank_speeds=speeds)
        try:
            found = best_partition(record, num_parameters, placement, cut, costs=units, program=program, memory=memory)
        except (ConfigurationError, SplitError):
            return None
        return [_called(found.units_of_stage(stage), flops) for stage in range(found.num_stages)]

    return PlanFacts(
        stages=[_called(partition.units_of_stage(stage), flops) for stage in range(partition.num_stages)],
        unit_costs=flops,
        unit_classes={name: type(unit).__name__ for name, unit in split.units.items()},
        held=StageCosts(0.0, 0.0, 0.0, held_after_forward=after_forward, held_after_input=after_input),
        memory_limit_gib=options.schedule.memory_limit_gib,
        cut_again=cut_again,
        names_schedule=not isinstance(options.schedule.source, FromFile),
        fixed_ms=assumed_speed(device_type).action_ms,
        product_weights=product_weights(split.record, split.fake_parameters.names),
    )


def model_facts(
    split: SplitModel, sizes: ParallelSizes, options: PipelineOptions, device: torch.device
) -> dict[str, int | str | bool]:
    """What the options of a pipeline became, and the size of its model, by name; the same on every rank."""
    parameters = [split.fake_parameters.names[name] for name in split.owners]
    return {
        "pipeline_parallel_size": sizes.pipeline,
        "data_parallel_size": sizes.data_parallel,
        "data_parallel_replicate_size": sizes.data_parallel_replicate,
        "tensor_parallel_size": sizes.tensor,
        "world_size": sizes.ranks_of_batch * sizes.data_parallel,
        "placement": split.placement.kind,
        "num_stages": split.placement.num_stages,
        "sharding": options.sharding.mode,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "num_trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }


def _called(units: Sequence[str], flops: Mapping[str, UnitCost]) -> list[str]:
    """Those that the step calls."""
    return [unit for unit in units if unit in flops]
