"""Opening a checkpoint of either format, and reading one whole."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from upath import UPath

from lightning_pp.checkpoint._torch_private import tree_map_only
from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together_if_several, from_root
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.reading.opened_file import FileCheckpoint
from lightning_pp.checkpoint.reading.opened_folder import FolderCheckpoint
from lightning_pp.checkpoint.reading.stored_tensor import StoredTensor
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage.location import is_folder


def open_checkpoint(
    path: str | os.PathLike[str] | UPath, mesh: DeviceMesh | None = None, *, weights_only: bool | None = None
) -> OpenedCheckpoint:
    """Open a folder or a file; the root looks which it is. Collective over all ranks of the mesh.

    Args:
        path: The checkpoint; the root's path counts.
        mesh: Axes ``pipeline`` and then those of data parallelism, over all ranks; None for a process without peers.
        weights_only: As in ``torch.load``; None is True: nothing that the checkpoint contains is executed.

    Raises:
        CheckpointError: On all ranks: there is no such checkpoint, it is incomplete or damaged, or it holds objects
            that ``weights_only`` forbids.
    """
    ranks = None if mesh is None else Ranks.from_mesh(mesh)
    is_root, share = (True, (0, 1)) if ranks is None else (ranks.is_root, ranks.share)
    with fail_together_if_several(ranks):
        is_sharded = False
        if is_root:
            location = folder.checkpoint_at(path)
            folder.recover(location)
            is_sharded = is_folder(location)
    if ranks is not None:
        path, is_sharded = from_root((str(path), is_sharded), ranks)
    with fail_together_if_several(ranks):
        opened: OpenedCheckpoint
        location = folder.checkpoint_at(path)
        if is_sharded:
            opened = FolderCheckpoint.open(location, weights_only, check_files=is_root)
        else:
            opened = FileCheckpoint.open(location, weights_only, share)
    return opened


def read_alone(path: str | os.PathLike[str] | UPath, weights_only: bool | None = None) -> dict[str, Any]:
    """A whole checkpoint of any layout in memory, as one device would have written it; in a process without peers.

    Raises:
        CheckpointError: There is none, it is incomplete or damaged, or holds what ``weights_only`` forbids.
    """
    opened = open_checkpoint(path, weights_only=weights_only)
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
