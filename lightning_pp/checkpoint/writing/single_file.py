"""Single-file checkpoints: exactly what a Trainer on one device saves and resumes from."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_pp.checkpoint._torch_private import keep_module_versions, tree_map_only
from lightning_pp.checkpoint.ownership.catalog import OptimizerGroups
from lightning_pp.checkpoint.ownership.rank_part import (
    RankPart,
    by_canonical_name,
    group_settings,
    is_wrapped,
    read_optimizer,
    to_save,
)
from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together, gather_entries
from lightning_pp.checkpoint.storage import folder, remote_folder
from lightning_pp.checkpoint.storage.location import Location, is_folder
from lightning_pp.errors import CheckpointError


def gather_full_state(part: RankPart, state_dict: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The unsplit module's ``state_dict`` on the root, collected tensor by tensor. Collective over all ranks.

    Args:
        part: What this rank holds.
        state_dict: Collected in place of the module's own; in the form of :meth:`RankPart.local_state_dict`.

    Returns:
        On the root an ordered dict of CPU tensors, in which tied names share one tensor; on other ranks an empty dict.

    Raises:
        CheckpointError: On all ranks: a name is nowhere, or unknown.
    """
    catalog, ranks = part.catalog, Ranks.from_mesh(part.mesh)
    with fail_together():
        own = part.module.state_dict()
        values = by_canonical_name(own if state_dict is None else state_dict, catalog)
        mine = to_save(values, catalog, ranks.pipeline_rank)
    gathered = gather_entries(mine, ranks, part.cuts)
    if not ranks.is_root:
        return {}
    full = OrderedDict((name, gathered[catalog.canonical_name(name)]) for name in catalog.names)
    keep_module_versions(full, own)
    return full


def gather_full_optimizer_state(part: RankPart, optimizer: Optimizer) -> dict[str, Any]:
    """One optimizer's ``state_dict`` as on a single device, on the root. Collective over all ranks.

    Args:
        part: What this rank holds.
        optimizer: One of ``part.optimizers``.

    Returns:
        On the root ``state`` by integer index and ``param_groups`` with integer ``params``; on others an empty dict.

    Raises:
        CheckpointError: On all ranks: the optimizer keeps state that belongs to no parameter of the module.
    """
    catalog, ranks = part.catalog, Ranks.from_mesh(part.mesh)
    index = next(index for index, known in enumerate(part.optimizers) if known is optimizer)
    settings = group_settings(optimizer)
    with fail_together():
        own = read_optimizer(optimizer, part.parameters())
        mine = {
            (name, key): value
            for name, values in own.state.items()
            if catalog.saver(name) == ranks.pipeline_rank
            for key, value in values.items()
        }
        for (name, key), value in mine.items():
            if is_wrapped(value):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name!r} in a {type(value[0]).__name__}, which torch "
                    "does not load from a single file. Set save_distributed_checkpoint=True on the strategy."
                )
    gathered = gather_entries(mine, ranks, part.cuts)
    labels: dict[str, str] = {}
    if any("param_names" in group for group in optimizer.param_groups):
        # A tied parameter may go by another name on a later stage.
        everywhere: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
        saved = {name: own.labels[name] for name in own.labels if catalog.saver(name) == ranks.pipeline_rank}
        dist.all_gather_object(everywhere, saved)
        labels = {name: label for part in everywhere for name, label in part.items()}
    if not ranks.is_root:
        return {}
    return _numbered(gathered, settings, labels, catalog.optimizer_groups[index])


def _numbered(
    values: Mapping[tuple[str, str], Any],
    hyper_parameters: list[dict[str, Any]],
    labels: Mapping[str, str],
    names: OptimizerGroups,
) -> dict[str, Any]:
    """An optimizer's ``state_dict``, with indices for names.

    Args:
        values: What it keeps, by the name of the parameter and its own key.
        hyper_parameters: Those of each parameter group.
        labels: The user's own names of the parameters; empty if there are none.
        names: The parameters of each group.
    """
    by_name: dict[str, dict[str, Any]] = {}
    for (name, key), value in values.items():
        by_name.setdefault(name, {})[key] = value
    indices = {name: number for number, name in enumerate(chain.from_iterable(names))}
    groups: list[dict[str, Any]] = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), hyper_parameters)
    for own_names, group in zip(names, groups, strict=True):
        if labels:
            group["param_names"] = [labels[name] for name in own_names]
        group["params"] = [indices[name] for name in own_names]
    state = {number: by_name[name] for name, number in indices.items() if name in by_name}
    return {"state": state, "param_groups": groups}


def make_room_for_file(path: Location) -> None:
    """Remove a sharded checkpoint from where a single file is to be written; on the root.

    Raises:
        IsADirectoryError: Another folder is there.
    """
    if is_folder(path):
        if not folder.is_sharded_checkpoint(path):
            raise IsADirectoryError(f"A single-file checkpoint cannot replace the folder {path}.")
        if isinstance(path, Path):
            shutil.rmtree(path)
        else:
            remote_folder.remove_folder(path)
