"""The table of contents of a sharded checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from lightning_pp.checkpoint import folder
from lightning_pp.checkpoint.local import state_placements
from lightning_pp.checkpoint.storage import KeyPath, unflatten
from lightning_pp.errors import CheckpointError


class Table:
    """What a sharded checkpoint holds: its keys, taken apart into paths."""

    def __init__(self, metadata: Metadata, path: Path) -> None:
        if not isinstance(metadata.planner_data, Mapping):
            raise CheckpointError(
                f"{path / folder.TABLE_FILENAME} has no paths of its keys; it was saved by another tool"
            )
        self.metadata = metadata
        self.paths: dict[str, KeyPath] = {
            key: tuple(metadata.planner_data[key]) for key in metadata.state_dict_metadata
        }
        self._model_keys = {str(path[1]): key for key, path in self.paths.items() if path[0] == "state_dict"}

    def has(self, name: str) -> bool:
        return name in self._model_keys

    def model_key(self, name: str) -> str:
        return self._model_keys[name]

    def model_shapes(self) -> dict[str, tuple[int, ...] | None]:
        return {name: self._shape(key) for name, key in self._model_keys.items()}

    def num_optimizers(self) -> int:
        return len({path[0] for path in self.paths.values() if len(path) > 1 and path[1] == "param_groups"})

    def below(self, *start: str | int) -> dict[str, KeyPath]:
        """The keys whose paths have this start, with what follows it."""
        return {key: path[len(start) :] for key, path in self.paths.items() if path[: len(start)] == start}

    def destination(self, key: str, existing: Any = None) -> Any:
        """Where to load a key to: the existing tensor, a new one, or nothing for an object."""
        entry = self.metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype) if existing is None else existing

    def optimizer_destinations(self, index: int, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Where to load what optimizer ``index`` keeps for these parameters: new tensors in this rank's shards."""
        destinations = {}
        for key, (name, *_) in self.below(f"optimizer_{index}", "state").items():
            parameter, shape = parameters.get(str(name)), self._shape(key)
            if parameter is None:
                continue
            if isinstance(parameter, DTensor) and shape:
                destinations[key] = empty_dtensor(
                    shape,
                    dtype=self.metadata.state_dict_metadata[key].properties.dtype,  # type: ignore[union-attr]
                    device_mesh=parameter.device_mesh,
                    placements=state_placements(shape, parameter),
                )
            else:
                destinations[key] = self.destination(key)
        return destinations

    def optimizer_state(self, index: int, loaded: Mapping[str, Any]) -> dict[str, Any]:
        state = self.below(f"optimizer_{index}", "state")
        nest: dict[str, Any] = unflatten({path: loaded[key] for key, path in state.items() if key in loaded})
        return nest

    def _shape(self, key: str) -> tuple[int, ...] | None:
        entry = self.metadata.state_dict_metadata[key]
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
