"""One rank's part of the module and of its optimizers, by canonical name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_pp.checkpoint._torch_private import tree_map_only
from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.cuts import NO_CUTS, Cuts, blocks_of
from lightning_pp.errors import CheckpointError, enumerate_names
from lightning_pp.sharding._torch_private import dtensor_of
from lightning_pp.tensor.parts import TensorPart, part_of


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a split model and its optimizers: it saves this part, and loads into it.

    Attributes:
        module: The module without the parameters of other ranks, but with all buffers and extra states; its parameters
            are tensors, or DTensors over the data-parallel axes.
        catalog: The unsplit module.
        mesh: The axis ``pipeline`` and then the others, over all ranks.
        optimizers: With this rank's parameters in the groups that a single device would have; none where only the
            model is saved or loaded.
        cuts: Which of its parameters are cut over tensor ranks.
    """

    module: Module
    catalog: ParameterCatalog
    mesh: DeviceMesh
    optimizers: Sequence[Optimizer] = ()
    cuts: Cuts = NO_CUTS

    def local_state_dict(self) -> dict[str, Any]:
        """What the module holds of the whole state: its own parameters, every buffer and every extra state.

        FSDP2 modules are brought to their sharded form.

        Returns:
            Canonical names in the catalogue's order, with what the module's ``state_dict()`` gives: tensors that share
            the storage of the module's, unless the user's class overrides it.

        Raises:
            CheckpointError: The module has names that the catalogue lacks.
        """
        return by_canonical_name(self.module.state_dict(), self.catalog)

    def destinations(self) -> dict[str, Any]:
        """Where to load what :meth:`local_state_dict` names: the module's own, where user code overrides that."""
        return by_canonical_name(Module.state_dict(self.module), self.catalog)

    def parameters(self) -> dict[str, Parameter]:
        """The parameters that this rank owns, by canonical name; FSDP2 modules are brought to their sharded form."""
        self.module.state_dict()
        return {self.catalog.canonical_name(name): parameter for name, parameter in self.module.named_parameters()}


@dataclass(frozen=True)
class OptimizerPart:
    """The state of one rank's optimizer, with names in place of indices.

    Attributes:
        state: For each canonical name with state, the optimizer's values (``exp_avg``, ``step``, ...).
        labels: The user's own names of parameters, for an optimizer made from ``named_parameters()``.
    """

    state: dict[str, dict[str, Any]]
    labels: dict[str, str]


def by_canonical_name(state_dict: Mapping[str, Any], catalog: ParameterCatalog) -> dict[str, Any]:
    """Drop the further names of tied parameters.

    Raises:
        CheckpointError: There are names that the catalogue lacks.
    """
    if strange := [name for name in state_dict if name not in catalog.owners and name not in catalog.canonical]:
        raise CheckpointError(
            f"the state_dict has {len(strange)} names that the module did not have when it was split: "
            f"{enumerate_names(strange)}; register parameters and buffers in __init__ or configure_model"
        )
    held = {catalog.canonical_name(name): value for name, value in state_dict.items()}
    return {name: held[name] for name in catalog.canonical_names if name in held}


def to_save(values: Mapping[str, Any], catalog: ParameterCatalog, pipeline_rank: int) -> dict[str, Any]:
    """The part of the state that this pipeline rank saves, which is that of the names that it is the first to own.

    Raises:
        CheckpointError: A name is not there.
    """
    mine = [name for name in catalog.canonical_names if catalog.saver(name) == pipeline_rank]
    if missing := [name for name in mine if name not in values]:
        raise CheckpointError(
            f"pipeline rank {pipeline_rank} owns {len(missing)} names that its state_dict does not have: "
            f"{enumerate_names(missing)}. A sharded checkpoint saves every name. To leave names out, save a single "
            "file (save_distributed_checkpoint=False) and remove them in on_save_checkpoint. Do not remove "
            "parameters after the set-up"
        )
    return {name: values[name] for name in mine}


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Settings of each parameter group. Collective over all ranks, as ``state_dict()`` is where states lie whole.

    They are those of the first rank that has parameters of the group: steps of the others may not see it.
    """
    groups = optimizer.state_dict()["param_groups"]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [without_parameters(group) if group["params"] else None for group in groups])
    found = (next((own for own in of_ranks if own is not None), None) for of_ranks in zip(*gathered, strict=True))
    return [without_parameters(group) if own is None else own for group, own in zip(groups, found, strict=True)]


def read_optimizer(optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> OptimizerPart:
    """Take an optimizer's state apart.

    Raises:
        CheckpointError: It holds parameters that the module does not have, or state that belongs to no parameter.
    """
    state_dict = optimizer.state_dict()
    names = _names_by_index(optimizer, parameters)
    strange = [key for key in state_dict if key not in ("state", "param_groups")]
    strange += [str(key) for key in state_dict["state"] if not isinstance(key, int)]
    if strange:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps state that belongs to no parameter ({enumerate_names(strange)}). A "
            "pipeline cannot divide such state among its stages. Use an optimizer that keeps its state by parameter"
        )
    labels = [label for group in optimizer.param_groups for label in group.get("param_names", ())]
    return OptimizerPart(
        state={names[i]: {k: _as_object(v) for k, v in values.items()} for i, values in state_dict["state"].items()},
        labels=dict(zip(names, labels, strict=True)) if labels else {},
    )


def write_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, Parameter],
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Load state by name; torch casts it to the parameters' dtypes and devices as on a single device.

    Args:
        optimizer: Holds parameters of this rank in as many groups as ``groups`` has.
        parameters: This rank's parameters by canonical name.
        state: The state of at least the parameters of this rank that have any, in this rank's shards.
        groups: The hyper-parameters.
    """
    names = _names_by_index(optimizer, parameters)
    indices = iter(range(len(names)))
    numbered = [
        {**without_parameters(group), "params": [next(indices) for _ in ours["params"]]}
        for group, ours in zip(groups, optimizer.param_groups, strict=True)
    ]
    present = {index: dict(state[name]) for index, name in enumerate(names) if name in state}
    for values in present.values():
        values.update({key: value[0] for key, value in values.items() if is_wrapped(value)})
    optimizer.load_state_dict({"state": present, "param_groups": numbered})


def _as_object(value: Any) -> Any:
    """A tensor of a class of its own, as of torchao's 8-bit states, in a tuple: so it is stored as the object it is."""
    is_plain = not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, Parameter, DTensor)
    return value if is_plain else (value,)


def is_wrapped(value: Any) -> bool:
    """Whether :func:`read_optimizer` has put a tensor of a class of its own into a tuple."""
    return type(value) is tuple and len(value) == 1 and _as_object(value[0]) is not value[0]


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's hyper-parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def shard_like(value: Any, parameter: torch.Tensor, part: TensorPart | None = None) -> Any:
    """This rank's own copy of a whole optimizer value, in the form that it has next to ``parameter``.

    Next to a DTensor, a tensor of the parameter's shape is sharded as the parameter is, another is replicated, and a
    scalar (the step count) stays a plain tensor. Nothing is sent: every rank has the whole value at hand. ``part`` says
    how the parameter is cut.
    """

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        if part is not None and tensor.shape == part.shape:
            tensor = part_of(tensor, part)
        if not isinstance(parameter, DTensor) or tensor.ndim == 0:
            return tensor.clone()
        mesh, placements = parameter.device_mesh, state_placements(tensor.shape, parameter)
        own = own_shard(tensor, mesh, placements).clone().to(parameter.device)
        return dtensor_of(own, mesh, placements, tensor.shape, tensor.stride())

    return tree_map_only(torch.Tensor, shard, value)


def state_placements(shape: Sequence[int], parameter: DTensor) -> tuple[Any, ...]:
    """How an optimizer value of this shape lies next to a sharded parameter."""
    if tuple(shape) == tuple(parameter.shape):
        return tuple(parameter.placements)
    return (Replicate(),) * parameter.device_mesh.ndim


@torch.no_grad()
def copy_into_shard(source: torch.Tensor, destination: torch.Tensor, part: TensorPart | None = None) -> None:
    """Copy a whole tensor into one of the module, of which this rank may have a shard or part; casts the dtype."""
    if part is not None:
        for offsets, block in blocks_of(destination, part).items():
            block.copy_(source[tuple(slice(at, at + size) for at, size in zip(offsets, block.shape, strict=True))])
    elif isinstance(destination, DTensor):
        destination.to_local().copy_(own_shard(source, destination.device_mesh, destination.placements))
    else:
        destination.copy_(source)


def own_shard(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The view of a whole tensor that this rank holds of it, so that of a mapped file nothing else is read.

    Raises:
        CheckpointError: It is neither sharded in even chunks nor replicated over an axis of the mesh.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh of its own parameters"
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            chunks = whole.chunk(mesh.size(axis), placement.dim)
            index = coordinate[axis]
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
        elif not isinstance(placement, Replicate):
            raise CheckpointError(f"a whole tensor cannot be loaded into a DTensor with placement {placement}")
    return whole


def set_extra_state(module: Module, name: str, value: Any) -> None:
    """Give the module's submodule the extra state that ``state_dict`` has under ``name``."""
    module.get_submodule(name.removesuffix("_extra_state").rstrip(".")).set_extra_state(value)


def _names_by_index(optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> list[str]:
    """The names of an optimizer's parameters in the order in which its ``state_dict`` numbers them."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if unknown := [tuple(parameter.shape) for parameter in held if id(parameter) not in names]:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds {len(unknown)} parameters that are not in the module, of shapes "
            f"{unknown[:10]}; give it only parameters of the LightningModule"
        )
    return [names[id(parameter)] for parameter in held]


def with_added_groups(part: RankPart) -> RankPart:
    """``part`` with a catalogue that knows all groups of its optimizers. Collective over all ranks.

    An added group has the parameters that all ranks have in theirs, in the order of the module.

    Raises:
        CheckpointError: On all ranks: they have different numbers of groups.
    """
    names = {id(parameter): name for name, parameter in part.parameters().items()}
    own = [
        [[names[id(each)] for each in group["params"] if id(each) in names] for group in optimizer.param_groups]
        for optimizer in part.optimizers
    ]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    groups = []
    for index, known in enumerate(part.catalog.optimizer_groups):
        numbers = [len(groups_of[index]) for groups_of in everywhere]
        if len(set(numbers)) > 1:
            raise CheckpointError(
                f"The ranks have {', '.join(map(str, numbers))} parameter groups in "
                f"{type(part.optimizers[index]).__name__}: only some of them called add_param_group. Call it on every "
                "rank, with an empty group where the stage has none of the parameters."
            )
        added = []
        for number in range(len(known), numbers[0]):
            held = {name for groups_of in everywhere for name in groups_of[index][number]}
            added.append(tuple(name for name in part.catalog.canonical_names if name in held))
        groups.append((*known, *added))
    return replace(part, catalog=replace(part.catalog, optimizer_groups=tuple(groups)))
