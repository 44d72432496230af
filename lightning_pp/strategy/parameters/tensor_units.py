"""This rank's units, to be cut over the tensor axis: what they are called with, and what stays whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pp.combined_optimizer import CombinedOptimizer
from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.meshes import tensor_mesh
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.planning.tensor_parts import Call
from lightning_pp.sharding.shard_updates import is_elementwise
from lightning_pp.split.head.parts import HeadPart
from lightning_pp.tensor import Plan, TensorParallelUnits


def tensor_parallel_units(
    split: SplitModel, rank: int, plan: Plan, mesh: DeviceMesh, calls: Sequence[Call]
) -> TensorParallelUnits | None:
    """The units of this rank with cuts for their parameters, which are still whole; None for one tensor rank.

    Args:
        split: The split model, of which nothing is dropped yet.
        rank: This rank's place in the pipeline.
        plan: ``tensor_parallel_plan`` of the strategy.
        mesh: The whole mesh.
        calls: What units were called with.

    Raises:
        ConfigurationError: The plan does not fit the model.
    """
    axis = tensor_mesh(mesh)
    if axis is None:
        return None
    own = split.units_of(rank)
    units = {name: unit for name, unit in own.items() if not isinstance(unit, HeadPart)}
    names = split.fake_parameters.names
    # tied to a unit of another rank, or used by the code between units
    shared = {names[name] for name in split.owners if name in split.direct or len(split.ranks_of(name)) > 1}
    for part in own.values():
        if isinstance(part, HeadPart):
            shared.update(split.module.get_submodule(part.head_name).parameters())
    found = TensorParallelUnits(split.module, units, plan, axis.get_group(), shared)
    for name, given in calls:
        if name in units:
            found.observe(name, *given)
    found.plan()
    return found


def refuse_distributed(module: nn.Module) -> None:
    """Raises :class:`ConfigurationError` if a parameter is a DTensor, as ``parallelize_module`` makes it."""
    if name := next((name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)), None):
        raise ConfigurationError(
            f"The parameter {name} of {type(module).__name__} is a DTensor. The strategy cuts parameters itself, as "
            "tensor_parallel_plan says. Take parallelize_module, distribute_tensor and fully_shard out of the module."
        )


def check_and_tell(split: SplitModel, groups: ControlGroups) -> None:
    """Has the first calls of units compared with whole units, and tells what is not cut; every rank calls it."""
    if split.tensor is not None:
        split.tensor.check_next_calls()
        counted = groups.gather_in_pipeline(split.tensor.counted())
        rank_zero_info(split.tensor.report(counted[:: groups.num_tensor_ranks]))


def refuse_other_updates(optimizer: Optimizer, cut: Mapping[str, nn.Parameter]) -> None:
    """Raises :class:`ConfigurationError` if ``optimizer`` updates parameters of ``cut``, by name, as whole tensors."""
    if isinstance(optimizer, CombinedOptimizer):
        for each in optimizer.optimizers:
            refuse_other_updates(each, cut)
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = [name for name, parameter in cut.items() if id(parameter) in held]
    if names and not is_elementwise(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} may compute an update from a whole matrix, but each tensor rank has a part of "
            f"{names[0]} and of {len(names) - 1} more parameters. Use an optimizer of torch.optim that updates each "
            "element by itself (AdamW, SGD, ...), or leave these parameters whole: tensor_parallel_plan={"
            f"{names[0].rpartition('.')[0]!r}: 'replicate', ...}}."
        )
