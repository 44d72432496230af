"""Checkpoints of any layout in one process without peers."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

from upath import UPath

from lightning_pp.checkpoint._torch_private import tree_map_only
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.reading.opened_file import FileCheckpoint
from lightning_pp.checkpoint.reading.opened_folder import FolderCheckpoint
from lightning_pp.checkpoint.reading.stored_tensor import StoredTensor
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage.location import is_folder


def open_alone(path: str | os.PathLike[str] | UPath, weights_only: bool | None = None) -> OpenedCheckpoint:
    """Open a checkpoint of either format in a process without peers.

    Raises:
        CheckpointError: There is none, it is incomplete or damaged, or holds what ``weights_only`` forbids.
    """
    location = folder.checkpoint_at(path)
    folder.recover(location)
    if is_folder(location):
        return FolderCheckpoint.open(location, weights_only, check_files=True)
    return FileCheckpoint.open(location, weights_only)


def read_alone(path: str | os.PathLike[str] | UPath, weights_only: bool | None = None) -> dict[str, Any]:
    """A whole checkpoint in memory, as one device would have written it.

    Raises:
        CheckpointError: There is none, it is incomplete or damaged, or holds what ``weights_only`` forbids.
    """
    opened = open_alone(path, weights_only)
    content = dict(opened.content)
    if (states := optimizer_states(opened)) or "optimizer_states" in content:
        content["optimizer_states"] = states
    everything: dict[str, Any] = tree_map_only(StoredTensor, lambda stored: stored.read(), content)
    return everything


def optimizer_states(opened: OpenedCheckpoint) -> list[Any]:
    """What ``state_dict`` of each optimizer would be on one device; tensors of a folder are not read yet."""
    if not isinstance(opened, FolderCheckpoint):
        states: list[Any] = opened.content.get("optimizer_states", [])
        return states
    states = []
    for index, groups in enumerate(opened.optimizer_groups()):
        names = list(chain.from_iterable(group["params"] for group in groups))
        numbers = {name: number for number, name in enumerate(names)}
        kept = opened.optimizer_content(index)
        states.append(
            {
                "state": {numbers[name]: kept[name] for name in names if name in kept},
                "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
            }
        )
    return states
