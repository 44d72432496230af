"""Single-file checkpoints: exactly what a Trainer on one device saves and resumes from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from lightning_pp.checkpoint._torch_private import keep_module_versions, tree_map_only
from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.local import (
    by_canonical_name,
    local_parameters,
    local_state_dict,
    read_optimizer,
    to_save,
)
from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together, gather_to_root


def gather_full_state(
    module: Module, *, catalog: ParameterCatalog, mesh: DeviceMesh, state_dict: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The unsplit module's ``state_dict`` on the root, collected tensor by tensor. Collective over all ranks.

    Args:
        module: This rank's part of the module.
        catalog: The unsplit module.
        mesh: Axes ``pipeline`` and then those of data parallelism, over all ranks.
        state_dict: What to collect in place of the module's own tensors; in the form of
            :func:`~lightning_pp.checkpoint.ownership.local.local_state_dict`.

    Returns:
        On the root an ordered dict of CPU tensors, in which tied names share one tensor; on other ranks an empty dict.

    Raises:
        CheckpointError: On all ranks: a name is nowhere, or unknown.
    """
    ranks = Ranks.from_mesh(mesh)
    with fail_together():
        own = module.state_dict()
        values = by_canonical_name(own if state_dict is None else state_dict, catalog)
        mine = to_save(values, catalog, ranks.pipeline_rank)
    gathered = gather_to_root(mine, ranks)
    if not ranks.is_root:
        return {}
    full = OrderedDict((name, gathered[catalog.canonical_name(name)]) for name in catalog.names)
    keep_module_versions(full, own)
    return full


def gather_full_optimizer_state(
    optimizer: Optimizer, index: int, *, module: Module, catalog: ParameterCatalog, mesh: DeviceMesh
) -> dict[str, Any]:
    """One optimizer's ``state_dict`` as on a single device, on the root. Collective over all ranks.

    Args:
        optimizer: With this rank's parameters in the groups that a single device would have.
        index: Its number among the optimizers.
        module: This rank's part of the module.
        catalog: The unsplit module.
        mesh: As in :func:`gather_full_state`.

    Returns:
        On the root ``state`` by integer index and ``param_groups`` with integer ``params``; on others an empty dict.

    Raises:
        CheckpointError: On all ranks: the optimizer keeps state that belongs to no parameter of the module.
    """
    ranks = Ranks.from_mesh(mesh)
    groups = catalog.optimizer_groups[index]
    with fail_together():
        local_state_dict(module, catalog)
        part = read_optimizer(optimizer, local_parameters(module, catalog))
        mine = {
            (name, key): value
            for name, values in part.state.items()
            if catalog.saver(name) == ranks.pipeline_rank
            for key, value in values.items()
        }
    gathered = gather_to_root(mine, ranks)
    labels: dict[str, str] = {}
    if any("param_names" in group for group in optimizer.param_groups):
        # A tied parameter may go by another name on a later stage.
        own = {name: label for name, label in part.labels.items() if catalog.saver(name) == ranks.pipeline_rank}
        labels = _merge(own)
    if not ranks.is_root:
        return {}
    values_of: dict[str, dict[str, Any]] = {}
    for (name, key), value in gathered.items():
        values_of.setdefault(name, {})[key] = value
    indices = {name: number for number, name in enumerate(chain.from_iterable(groups))}
    hyper_parameters: list[dict[str, Any]] = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), part.groups)
    for names, group in zip(groups, hyper_parameters, strict=True):
        if labels:
            group["param_names"] = [labels[name] for name in names]
        group["params"] = [indices[name] for name in names]
    state = {number: values_of[name] for name, number in indices.items() if name in values_of}
    return {"state": state, "param_groups": hyper_parameters}


def _merge(labels: dict[str, str]) -> dict[str, str]:
    everywhere: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, labels)
    return {name: label for part in everywhere for name, label in part.items()}
