"""This rank's units, to be cut over the tensor axis: their arguments, and the parameters that stay whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.meshes import tensor_mesh
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.planning.tensor_parts import Call, head_and_tied
from lightning_pp.sharding.shard_updates import is_elementwise, parts_of
from lightning_pp.split.head.parts import HeadPart
from lightning_pp.strategy.surroundings import Surroundings
from lightning_pp.tensor.units import TensorParallelUnits


def tensor_parallel_units(split: SplitModel, given: Surroundings, calls: Sequence[Call]) -> TensorParallelUnits | None:
    """The units of this rank with cuts for their parameters, which are still whole; None for one tensor rank.

    Nothing of ``split`` is dropped yet, and ``calls`` are what its units were called with.

    Raises:
        ConfigurationError: The plan does not fit the model.
    """
    axis = tensor_mesh(given.mesh)
    if axis is None:
        return None
    units = {name: unit for name, unit in split.units_of(given.rank).items() if not isinstance(unit, HeadPart)}
    names = split.fake_parameters.names
    direct = {names[name] for name in split.direct}
    head, tied = head_and_tied(split.record, split.module, split.units, given.options.tensor_parallel_plan, axis.size())
    tied -= direct
    # tied to a unit of another rank, or used by the code between units
    shared = {names[name] for name in split.owners if len(split.ranks_of(name)) > 1}.difference(tied) | direct
    options = given.options
    found = TensorParallelUnits(
        split.module,
        units,
        options.tensor_parallel_plan,
        axis.get_group(),
        shared,
        options.sequence_parallel,
        tied,
        head,
    )
    if head is not None and not options.schedule.whole_batch_loss:
        is_recomputed = split.recomputation is not None and head in split.recomputation.units
        found.defers_logits = not (is_recomputed or split.record.calls[-1].leaves[0].edited_in_place)
    for name, (args, kwargs) in calls:
        if name in units:
            found.observe(name, args, kwargs)
    found.plan()
    return found


def refuse_distributed(module: nn.Module) -> None:
    """Raises :class:`ConfigurationError` if a parameter is a DTensor, as ``parallelize_module`` makes it."""
    if name := next((name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)), None):
        raise ConfigurationError(
            f"The parameter {name} of {type(module).__name__} is a DTensor. The strategy cuts parameters itself, as "
            "tensor_parallel_plan says. Take parallelize_module, distribute_tensor and fully_shard out of the module."
        )


def check_and_report(split: SplitModel, groups: ControlGroups) -> None:
    """Compares the first calls of units with whole units, and logs parameters that are not cut; every rank calls it."""
    if split.tensor is not None:
        split.tensor.check_next_calls()
        counted = groups.gather_in_pipeline(split.tensor.counted())
        rank_zero_info(split.tensor.report(counted[:: groups.num_tensor_ranks]))


def refuse_other_updates(optimizer: Optimizer, cut: Mapping[str, nn.Parameter]) -> None:
    """Raises :class:`ConfigurationError` if ``optimizer`` updates parameters of ``cut``, by name, as whole tensors."""
    for each in parts_of(optimizer):
        held = {id(parameter) for group in each.param_groups for parameter in group["params"]}
        names = [name for name, parameter in cut.items() if id(parameter) in held]
        if names and not is_elementwise(each):
            raise ConfigurationError(
                f"{type(each).__name__} may compute an update from a whole matrix, but each tensor rank has a part of "
                f"{names[0]} and of {len(names) - 1} more parameters. Use an optimizer of torch.optim that updates "
                "each element by itself (AdamW, SGD, ...), or leave these parameters whole: tensor_parallel_plan={"
                f"{names[0].rpartition('.')[0]!r}: 'replicate', ...}}."
            )
