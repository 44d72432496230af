"""A sharded checkpoint of any layout, opened."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.rank_part import RankPart
from lightning_pp.checkpoint.ownership.ranks import fail_together
from lightning_pp.checkpoint.reading.checks import check_group_names, check_num_optimizers
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.reading.stored_tensor import StoredTensor
from lightning_pp.checkpoint.reading.table import Table
from lightning_pp.checkpoint.reading.torch_file import read_file
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage import torch_storage as storage
from lightning_pp.checkpoint.storage.location import Location
from lightning_pp.checkpoint.storage.remote_folder import trainer_state_file
from lightning_pp.checkpoint.storage.torch_storage import NamingReader


class FolderCheckpoint(OpenedCheckpoint):
    """A sharded checkpoint of any layout."""

    def __init__(self, path: Location, content: dict[str, Any], table: Table, reader: NamingReader) -> None:
        super().__init__(path, content)
        self.table = table
        self._reader = reader

    @classmethod
    def open(cls, path: Location, weights_only: bool | None, *, check_files: bool) -> FolderCheckpoint:
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
        trainer_state: dict[str, Any] = read_file(trainer_state_file(path, table.metadata), weights_only)
        stored = _stored(table, reader, [key for keys in table.states().values() for key in keys.values()])
        states = {
            container: OrderedDict((name, stored[key]) for name, key in keys.items())
            for container, keys in table.states().items()
        }
        return cls(path, {**trainer_state, **states}, table, reader)

    @property
    def reader(self) -> NamingReader:
        return self._reader

    def checked_groups(
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
        stored = _stored(self.table, self._reader, keys)
        nest: dict[str, Any] = storage.unflatten({path: stored[key] for key, path in keys.items()})
        return nest

    def own_states(
        self, part: RankPart, parameters: Mapping[str, Parameter], content: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        number = len(part.optimizers)
        with fail_together():
            wanted: dict[str, Any] = {}
            blocks: dict[str, storage.Blocks] = {}
            for index in range(number):
                own, own_blocks = self.table.optimizer_destinations(index, parameters, part.cuts)
                wanted.update(own)
                blocks.update(own_blocks)
        loaded = storage.load(wanted, self._reader, blocks=blocks)
        with fail_together():
            return [self.table.optimizer_state(index, loaded) for index in range(number)]


def read_tensor(table: Table, reader: NamingReader, key: str) -> torch.Tensor:
    """Read one tensor whole, in this process alone."""
    reader.storage_data = table.metadata.storage_data or {}
    tensor: torch.Tensor = storage.load({key: table.destination(key)}, reader, alone=True)[key]
    return tensor


def _stored(table: Table, reader: NamingReader, keys: Collection[str]) -> dict[str, Any]:
    """What is stored under ``keys``: objects, and tensors that are read when they are used."""
    stored: dict[str, Any] = storage.load({key: None for key in keys if not table.tensor(key)}, reader, alone=True)
    for key in keys:
        if (entry := table.tensor(key)) is not None:
            read = partial(read_tensor, table, reader, key)
            stored[key] = StoredTensor(key, entry.size, entry.properties.dtype, read)
    return stored
