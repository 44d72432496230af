"""Checkpoints of either format between two steps: opened and checked by themselves, then loaded into a model.

In between, hooks may edit what was opened: rename, drop, cut or add.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_pp.checkpoint import folder, storage
from lightning_pp.checkpoint.catalog import ParameterCatalog
from lightning_pp.checkpoint.files import read_file
from lightning_pp.checkpoint.fit import check_group_names, check_group_sizes, check_model, check_num_optimizers
from lightning_pp.checkpoint.local import (
    copy_whole,
    local_parameters,
    local_state_dict,
    set_extra_state,
    shard_like,
    write_optimizer,
)
from lightning_pp.checkpoint.ranks import Ranks, fail_together, from_root
from lightning_pp.checkpoint.sharded import MODEL
from lightning_pp.checkpoint.storage import NamingReader
from lightning_pp.checkpoint.stored_tensor import StoredTensor
from lightning_pp.checkpoint.table import Table
from lightning_pp.errors import CheckpointError


class OpenedCheckpoint(ABC):
    """A checkpoint of which the content is known and no tensor has been read.

    Attributes:
        path: The file or folder.
        content: All of it but the optimizers of a sharded one; ``state_dict`` has tensors that are read where they are
            used: mapped into memory (a file), or :class:`StoredTensor` (a folder).
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    def load(
        self,
        *,
        module: Module,
        optimizers: Sequence[Optimizer],
        catalog: ParameterCatalog,
        content: Mapping[str, Any] | None = None,
        strict: bool = True,
    ) -> None:
        """Load the model, and the optimizers if there are any. Collective over all ranks.

        Nothing is changed before all checks have passed on all ranks. A rank reads what it owns.

        Args:
            module: This rank's part; its parameters, all buffers and extra states are overwritten in place.
            optimizers: Their state and hyper-parameters are replaced; empty to load the module only.
            catalog: The unsplit module.
            content: What hooks have made of :attr:`content`.
            strict: Whether names that are missing in the checkpoint or in the model are errors.

        Raises:
            CheckpointError: On all ranks: the checkpoint is damaged, or does not fit the model.
        """
        content = self.content if content is None else content
        with fail_together():
            saved = content.get(MODEL)
            if not isinstance(saved, Mapping):
                raise CheckpointError(f"{self.path} has no 'state_dict' left after on_load_checkpoint; keep it")
            check_model(self.path, {name: _shape(value) for name, value in saved.items()}, catalog, strict)
        groups = self.check_optimizers(len(optimizers), catalog, content) if optimizers else []
        load_state(saved, module, catalog, self.reader)
        self.load_optimizers(optimizers, groups, module, catalog, content)

    @property
    def reader(self) -> NamingReader | None:
        """What reads the stored tensors in ``content``."""
        return None

    @abstractmethod
    def check_optimizers(self, number: int, catalog: ParameterCatalog, content: Mapping[str, Any]) -> Any:
        """Compare the checkpoint's optimizers with those of the model; returns their groups."""

    @abstractmethod
    def load_optimizers(
        self,
        optimizers: Sequence[Optimizer],
        groups: Any,
        module: Module,
        catalog: ParameterCatalog,
        content: Mapping[str, Any],
    ) -> None:
        """Load the state of the optimizers."""


class FileCheckpoint(OpenedCheckpoint):
    """A single file of any Trainer, mapped into memory."""

    @classmethod
    def open(cls, path: Path, weights_only: bool | None) -> FileCheckpoint:
        """Map a file; every rank does.

        Raises:
            CheckpointError: The file is missing, damaged or no checkpoint.
        """
        checkpoint = read_file(path, weights_only, mmap=True)
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(MODEL), Mapping):
            raise CheckpointError(
                f"{path} has no 'state_dict', so it is not a checkpoint of a Trainer; use another file"
            )
        mapped = (MODEL, "optimizer_states", "current_model_state")
        rest = {key: value for key, value in checkpoint.items() if key not in mapped}
        rest = tree_map_only(torch.Tensor, torch.clone, rest)  # does not hold on to the file
        return cls(path, {**checkpoint, **rest})

    def check_optimizers(self, number: int, catalog: ParameterCatalog, content: Mapping[str, Any]) -> None:
        with fail_together():
            saved = content.get("optimizer_states", [])
            check_num_optimizers(self.path, len(saved), number)
            for index, (state, groups) in enumerate(zip(saved, catalog.optimizer_groups, strict=True)):
                check_group_sizes(self.path, index, [len(group["params"]) for group in state["param_groups"]], groups)

    def load_optimizers(
        self,
        optimizers: Sequence[Optimizer],
        groups: Any,
        module: Module,
        catalog: ParameterCatalog,
        content: Mapping[str, Any],
    ) -> None:
        with fail_together():
            parameters = local_parameters(module, catalog)
            for index, optimizer in enumerate(optimizers):
                state = content["optimizer_states"][index]
                numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
                names = dict(zip(numbers, chain.from_iterable(catalog.optimizer_groups[index]), strict=True))
                mine = {
                    names[number]: shard_like(kept, parameters[names[number]])
                    for number, kept in state["state"].items()
                    if names[number] in parameters
                }
                write_optimizer(optimizer, parameters, mine, state["param_groups"])


class FolderCheckpoint(OpenedCheckpoint):
    """A sharded checkpoint of any layout."""

    def __init__(self, path: Path, content: dict[str, Any], table: Table, reader: NamingReader) -> None:
        super().__init__(path, content)
        self.table = table
        self._reader = reader

    @classmethod
    def open(cls, path: Path, weights_only: bool | None, *, check_files: bool) -> FolderCheckpoint:
        """Read what is in a folder but its tensors.

        Args:
            path: The folder.
            weights_only: As in ``torch.load``; None is True.
            check_files: Look whether all shards are there; one rank's look is enough.

        Raises:
            CheckpointError: The folder is incomplete or damaged.
        """
        folder.check_finished(path)
        reader = NamingReader(path, weights_only is not False)
        table = Table(reader.read_metadata(), path)
        if check_files:
            folder.check_complete(path, table.metadata)
        rest: dict[str, Any] = read_file(path / folder.REST_FILENAME, weights_only)
        objects = {key: None for keys in table.states().values() for key in keys.values() if not table.tensor(key)}
        loaded = storage.load(objects, reader, alone=True)

        states = {
            container: OrderedDict((name, _stored(table, reader, key, loaded)) for name, key in keys.items())
            for container, keys in table.states().items()
        }
        return cls(path, {**rest, **states}, table, reader)

    @property
    def reader(self) -> NamingReader:
        return self._reader

    def check_optimizers(
        self, number: int, catalog: ParameterCatalog, content: Mapping[str, Any]
    ) -> list[list[dict[str, Any]]]:
        with fail_together():
            check_num_optimizers(self.path, self.table.num_optimizers(), number)
            groups = self.optimizer_groups()
            for index, names in enumerate(catalog.optimizer_groups[:number]):
                check_group_names(self.path, index, [group["params"] for group in groups[index]], names)
        return groups

    def optimizer_groups(self) -> list[list[dict[str, Any]]]:
        """The parameter groups of each optimizer, with names for parameters."""
        keys = [self.table.below(f"optimizer_{index}", "param_groups") for index in range(self.table.num_optimizers())]
        wanted = {key: self.table.destination(key) for paths in keys for key in paths}
        loaded = storage.load(wanted, self._reader, alone=True)
        return [storage.unflatten({path: loaded[key] for key, path in paths.items()}) for paths in keys]

    def optimizer_content(self, index: int) -> dict[str, Any]:
        """What optimizer ``index`` keeps by parameter name, with tensors that are read when they are used."""
        keys = self.table.below(f"optimizer_{index}", "state")
        objects = {key: None for key in keys if not self.table.tensor(key)}
        loaded = storage.load(objects, self._reader, alone=True)
        nest: dict[str, Any] = storage.unflatten(
            {path: _stored(self.table, self._reader, key, loaded) for key, path in keys.items()}
        )
        return nest

    def load_optimizers(
        self,
        optimizers: Sequence[Optimizer],
        groups: Any,
        module: Module,
        catalog: ParameterCatalog,
        content: Mapping[str, Any],
    ) -> None:
        with fail_together():
            parameters = local_parameters(module, catalog)
            wanted: dict[str, Any] = {}
            for index in range(len(optimizers)):
                wanted.update(self.table.optimizer_destinations(index, parameters))
        loaded = storage.load(wanted, self._reader)
        with fail_together():
            for index, optimizer in enumerate(optimizers):
                write_optimizer(optimizer, parameters, self.table.optimizer_state(index, loaded), groups[index])


def open_checkpoint(
    path: str | os.PathLike[str], *, mesh: DeviceMesh, weights_only: bool | None = None
) -> OpenedCheckpoint:
    """Open a folder or a file; the root looks which it is. Collective over all ranks.

    Args:
        path: The checkpoint; the root's path counts.
        mesh: Axes ``pipeline`` and then those of data parallelism, over all ranks.
        weights_only: As in ``torch.load``; None is True: nothing that the checkpoint contains is executed.

    Raises:
        CheckpointError: On all ranks: there is no such checkpoint, it is incomplete or damaged, or it holds objects
            that ``weights_only`` forbids.
    """
    ranks = Ranks.from_mesh(mesh)
    with fail_together():
        is_folder = False
        if ranks.is_root:
            folder.recover(Path(path))
            is_folder = Path(path).is_dir()
    path, is_folder = from_root((os.fspath(path), is_folder), ranks)
    with fail_together():
        opened: OpenedCheckpoint
        if is_folder:
            opened = FolderCheckpoint.open(Path(path), weights_only, check_files=ranks.is_root)
        else:
            opened = FileCheckpoint.open(Path(path), weights_only)
    return opened


def load_state(
    saved: Mapping[str, Any], module: Module, catalog: ParameterCatalog, reader: NamingReader | None
) -> None:
    """Put whole named values into this rank's part of the module. Collective over all ranks.

    Args:
        saved: Tensors and extra states by name; names that this rank does not own are not looked at.
        module: This rank's part.
        catalog: The unsplit module.
        reader: Reads the stored tensors among them, of which a shard is read for a shard.

    Raises:
        CheckpointError: On all ranks: something could not be read or copied.
    """
    with fail_together():
        # A tied parameter may be there under each of its names: the last counts, as in Module.load_state_dict.
        by_owner = {catalog.canonical_name(name): value for name, value in saved.items()}
        to_read: dict[str, Any] = {}
        for name, destination in local_state_dict(module, catalog).items():
            if name not in by_owner:
                continue
            value = by_owner[name]
            if not isinstance(destination, torch.Tensor) or name not in catalog.shapes:
                set_extra_state(module, name, value)
            elif reader is not None and isinstance(value, StoredTensor) and value.key not in to_read:
                to_read[value.key] = destination
            else:
                copy_whole(value.read() if isinstance(value, StoredTensor) else value, destination)
    if reader is not None:
        storage.load(to_read, reader)


def read_tensor(table: Table, reader: NamingReader, key: str) -> torch.Tensor:
    """Read one tensor whole, in this process alone."""
    reader.storage_data = table.metadata.storage_data or {}
    tensor: torch.Tensor = storage.load({key: table.destination(key)}, reader, alone=True)[key]
    return tensor


def _stored(table: Table, reader: NamingReader, key: str, objects: Mapping[str, Any]) -> Any:
    entry = table.tensor(key)
    if entry is None:
        return objects[key]
    return StoredTensor(key, entry.size, entry.properties.dtype, lambda: read_tensor(table, reader, key))


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
