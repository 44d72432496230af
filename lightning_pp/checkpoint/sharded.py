"""Sharded checkpoints: every rank writes what it holds, under names that mean the same in every layout."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from lightning_pp.checkpoint import folder, storage
from lightning_pp.checkpoint.catalog import ParameterCatalog
from lightning_pp.checkpoint.files import read_file
from lightning_pp.checkpoint.fit import check_group_names, check_model, check_num_optimizers
from lightning_pp.checkpoint.local import (
    by_canonical_name,
    local_parameters,
    local_state_dict,
    read_optimizer,
    set_extra_state,
    to_save,
    write_optimizer,
)
from lightning_pp.checkpoint.ranks import Ranks, fail_together, from_root
from lightning_pp.checkpoint.storage import KeyPath, NamingReader, TyingWriter
from lightning_pp.checkpoint.table import Table
from lightning_pp.errors import CheckpointError


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether this is a folder that a sharded checkpoint was saved to, complete or not."""
    return any((Path(path) / name).is_file() for name in (folder.TABLE_FILENAME, folder.REST_FILENAME))


def save_sharded(
    path: str | os.PathLike[str],
    *,
    module: Module,
    optimizers: Sequence[Optimizer],
    catalog: ParameterCatalog,
    mesh: DeviceMesh,
    rest: Mapping[str, Any],
    state_dict: Mapping[str, Any] | None = None,
) -> None:
    """Save a folder that replaces what is at ``path`` once all ranks have finished. Collective over all ranks.

    ::

        root:  make an empty folder beside ``path``; write ``rest`` into it
        all:   write own shards; the first owner of a name writes it, spread over its data-parallel ranks
        root:  write the table of contents; move the folder to ``path``; remove the one that was there

    Args:
        path: On a file system that all ranks share; the root's counts.
        module: This rank's part of the module; its own parameters are tensors or DTensors over the data-parallel axes.
        optimizers: With this rank's parameters in the groups that a single device would have; empty to save weights
            only.
        catalog: The unsplit module.
        mesh: Axes ``pipeline`` and then those of data parallelism, over all ranks.
        rest: Whatever else the checkpoint has; picklable; the root's counts.
        state_dict: What to save in place of the module's own tensors, such as averaged weights; in the form of
            :func:`~lightning_pp.checkpoint.local.local_state_dict`.

    Raises:
        CheckpointError: On all ranks, if one of them failed; what was at ``path`` is untouched then.
    """
    ranks = Ranks.from_mesh(mesh)
    path = _local_path(from_root(os.fspath(path), ranks))
    try:
        with fail_together():
            entries = _entries_to_save(module, optimizers, catalog, ranks, state_dict)
            if ranks.is_root:
                folder.begin(path)
                _write_rest(rest, folder.staging_path(path) / folder.REST_FILENAME)
        with fail_together():
            if not folder.staging_path(path).is_dir():
                raise CheckpointError(
                    f"{folder.staging_path(path)}, made by the first rank, is not visible here: sharded checkpoints "
                    "need a file system that all nodes share; choose a path on one, or set "
                    "save_distributed_checkpoint=False"
                )
        storage.save(entries, TyingWriter(folder.staging_path(path), catalog.canonical, "state_dict"))
        with fail_together():
            if ranks.is_root:
                folder.commit(path)
    except BaseException:
        if ranks.is_root:
            folder.abandon(path)
        raise


def load_sharded(
    path: str | os.PathLike[str],
    *,
    module: Module,
    optimizers: Sequence[Optimizer],
    catalog: ParameterCatalog,
    mesh: DeviceMesh,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load a sharded checkpoint, of whatever layout, into this one. Collective over all ranks.

    Nothing is changed before all checks have passed on all ranks. Only load folders that you trust: the table of
    contents and hyper-parameters are pickles whatever ``weights_only`` says.

    Args:
        path: The folder; the root's counts.
        module: This rank's part; its parameters, all buffers and extra states are overwritten in place.
        optimizers: Their state and hyper-parameters are replaced; empty to load the module only.
        catalog: The unsplit module.
        mesh: As in :func:`save_sharded`.
        strict: Whether names that are missing in the checkpoint or in the model are errors.
        weights_only: As in ``torch.load``, for the rest of the checkpoint.

    Returns:
        The rest of the checkpoint, on every rank.

    Raises:
        CheckpointError: On all ranks: the folder is incomplete or damaged, or does not fit the model.
    """
    ranks = Ranks.from_mesh(mesh)
    path = _local_path(from_root(os.fspath(path), ranks))
    with fail_together():
        if ranks.is_root:
            folder.recover(path)
    with fail_together():
        folder.check_finished(path)
        table = Table(NamingReader(path).read_metadata(), path)
        if ranks.is_root:
            folder.check_complete(path, table.metadata)
        rest: dict[str, Any] = read_file(path / folder.REST_FILENAME, weights_only)
        check_model(path, table.model_shapes(), catalog, strict)
        if optimizers:
            check_num_optimizers(path, table.num_optimizers(), len(optimizers))
    groups = _load_groups(path, table, len(optimizers))
    with fail_together():
        for index, names in enumerate(catalog.optimizer_groups[: len(optimizers)]):
            check_group_names(path, index, [group["params"] for group in groups[index]], names)
        values = local_state_dict(module, catalog)
        parameters = local_parameters(module, catalog)
        # A tied parameter is in the checkpoint under each of its names: the last counts, as in Module.load_state_dict.
        keys = {catalog.canonical_name(name): table.model_key(name) for name in catalog.names if table.has(name)}
        wanted = {keys[name]: table.destination(keys[name], value) for name, value in values.items() if name in keys}
        for index in range(len(optimizers)):
            wanted.update(table.optimizer_destinations(index, parameters))
    loaded = storage.load(wanted, NamingReader(path))
    with fail_together():
        for name in values:
            if name not in catalog.shapes and name in keys:
                set_extra_state(module, name, loaded[keys[name]])
        for index, optimizer in enumerate(optimizers):
            write_optimizer(optimizer, parameters, table.optimizer_state(index, loaded), groups[index])
    return rest


def _load_groups(path: Path, table: Table, num_optimizers: int) -> list[list[dict[str, Any]]]:
    """The parameter groups of each optimizer, with names; on every rank."""
    keys = {index: table.below(f"optimizer_{index}", "param_groups") for index in range(num_optimizers)}
    wanted = {key: table.destination(key) for paths in keys.values() for key in paths}
    loaded = storage.load(wanted, NamingReader(path)) if wanted else {}
    return [storage.unflatten({path: loaded[key] for key, path in keys[index].items()}) for index in keys]


def _entries_to_save(
    module: Module,
    optimizers: Sequence[Optimizer],
    catalog: ParameterCatalog,
    ranks: Ranks,
    state_dict: Mapping[str, Any] | None,
) -> dict[KeyPath, Any]:
    values = local_state_dict(module, catalog)
    if state_dict is not None:
        values = by_canonical_name(state_dict, catalog)
    mine = to_save(values, catalog, ranks.pipeline_rank)
    entries: dict[KeyPath, Any] = {}
    for name, value in mine.items():
        # Extra state is one object even where it holds tensors: set_extra_state gets back what get_extra_state gave.
        entries["state_dict", name] = value
    parameters = local_parameters(module, catalog)
    for index, optimizer in enumerate(optimizers):
        part, prefix = read_optimizer(optimizer, parameters), f"optimizer_{index}"
        for name, state in part.state.items():
            if catalog.saver(name) == ranks.pipeline_rank:
                entries.update(storage.flatten((prefix, "state", name), state))
        if ranks.is_root:
            for number, (group, names) in enumerate(zip(part.groups, catalog.optimizer_groups[index], strict=True)):
                for key, value in {**group, "params": list(names)}.items():
                    entries[prefix, "param_groups", number, key] = value
    return entries


def _write_rest(rest: Mapping[str, Any], file: Path) -> None:
    with file.open("wb") as stream:
        torch.save(dict(rest), stream)
        stream.flush()
        os.fsync(stream.fileno())


def _local_path(path: str) -> Path:
    if "://" in path:
        raise CheckpointError(
            f"{path} is not a path: sharded checkpoints are saved to and loaded from file systems only"
        )
    return Path(path)
