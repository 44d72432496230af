"""The table of contents of a sharded checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from lightning_pp.checkpoint.content import MODEL
from lightning_pp.checkpoint.ownership.cuts import Cuts, blocks_of
from lightning_pp.checkpoint.ownership.rank_part import state_placements
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage.location import Location
from lightning_pp.checkpoint.storage.torch_storage import Blocks, KeyPath, unflatten
from lightning_pp.errors import CheckpointError


class Table:
    """The keys of a sharded checkpoint, split into paths."""

    def __init__(self, metadata: Metadata, path: Location) -> None:
        if not isinstance(metadata.planner_data, Mapping):
            raise CheckpointError(
                f"{path / folder.TABLE_FILENAME} does not list the paths of its keys, so another tool saved it"
            )
        self.metadata = metadata
        self.paths: dict[str, KeyPath] = {
            key: tuple(metadata.planner_data[key]) for key in metadata.state_dict_metadata
        }
        self._places: dict[str, tuple[str, int]] | None = None

    def states(self) -> dict[str, dict[str, str]]:
        """For ``state_dict`` and each container like it, the keys by name."""
        found: dict[str, dict[str, str]] = {MODEL: {}}
        for key, path in self.paths.items():
            if len(path) == 2 and not str(path[0]).startswith("optimizer_"):
                found.setdefault(str(path[0]), {})[str(path[1])] = key
        return found

    def place(self, key: str) -> tuple[str, int]:
        """File and offset of the first piece of a key's bytes, which tied names share."""
        if self._places is None:
            self._places = {}
            for index, stored in (self.metadata.storage_data or {}).items():
                if not any(index.offset or ()):
                    self._places[index.fqn] = (stored.relative_path, stored.offset)
        return self._places[key]

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """Shape and dtype of a key; None for an object."""
        entry = self.metadata.state_dict_metadata[key]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def num_optimizers(self) -> int:
        return len({path[0] for path in self.paths.values() if len(path) > 1 and path[1] == "param_groups"})

    def below(self, *start: str | int) -> dict[str, KeyPath]:
        """The keys whose paths have this start, with what follows it."""
        return {key: path[len(start) :] for key, path in self.paths.items() if path[: len(start)] == start}

    def destination(self, key: str) -> torch.Tensor | None:
        """Where to load a key to: a new tensor, or nothing for an object."""
        entry = self.tensor(key)
        return None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)

    def optimizer_destinations(
        self, index: int, parameters: Mapping[str, torch.Tensor], cuts: Cuts
    ) -> tuple[dict[str, Any], dict[str, Blocks]]:
        """Where to load what optimizer ``index`` keeps for these parameters: new tensors in this rank's shards.

        Of those that are cut over tensor ranks, the blocks as well.
        """
        destinations: dict[str, Any] = {}
        blocks: dict[str, Blocks] = {}
        for key, (name, *_) in self.below(f"optimizer_{index}", "state").items():
            parameter, entry = parameters.get(str(name)), self.tensor(key)
            if parameter is None:
                continue
            if entry is None:
                destinations[key] = None
                continue
            part, shape, dtype = cuts.parts.get(str(name)), tuple(entry.size), entry.properties.dtype
            if part is not None and entry.size == part.shape:
                shape = tuple(part.local_shape)
            if isinstance(parameter, DTensor) and shape:
                mesh, placements = parameter.device_mesh, state_placements(shape, parameter)
                destinations[key] = empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=placements)
            else:
                destinations[key] = torch.empty(shape, dtype=dtype)
            if part is not None and entry.size == part.shape:
                blocks[key] = part.shape, blocks_of(destinations[key], part)
        return destinations, blocks

    def optimizer_state(self, index: int, loaded: Mapping[str, Any]) -> dict[str, Any]:
        state = self.below(f"optimizer_{index}", "state")
        nest: dict[str, Any] = unflatten({path: loaded[key] for key, path in state.items() if key in loaded})
        return nest
