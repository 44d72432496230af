"""Opening a checkpoint of either format, and reading one whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from upath import UPath

from lightning_pp.checkpoint._torch_private import tree_map_only
from lightning_pp.checkpoint.content import CURRENT_MODEL, MODEL, OPTIMIZERS
from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.rank_part import RankPart, shard_like
from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together, fail_together_if_several, from_root
from lightning_pp.checkpoint.reading.checks import check_group_sizes, check_num_optimizers
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.reading.opened_folder import FolderCheckpoint
from lightning_pp.checkpoint.reading.stored_tensor import StoredTensor
from lightning_pp.checkpoint.reading.torch_file import read_file
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage.location import Location, is_folder
from lightning_pp.errors import CheckpointError


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


class FileCheckpoint(OpenedCheckpoint):
    """A single file of any Trainer, mapped into memory; of one at a URL, a download."""

    @classmethod
    def open(cls, path: Location, weights_only: bool | None, share: tuple[int, int] = (0, 1)) -> FileCheckpoint:
        """Map a file; every rank does, and compares its share of the tensors with their checksums.

        Raises:
            CheckpointError: The file is missing, damaged or no checkpoint.
        """
        checkpoint = read_file(path, weights_only, mmap=True, share=share)
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(MODEL), Mapping):
            raise CheckpointError(
                f"{path} has no 'state_dict', so it is not a checkpoint of a Trainer; use another file"
            )
        mapped = (MODEL, OPTIMIZERS, CURRENT_MODEL)
        trainer_state = {key: value for key, value in checkpoint.items() if key not in mapped}
        trainer_state = tree_map_only(torch.Tensor, torch.clone, trainer_state)  # does not hold on to the file
        return cls(path, {**checkpoint, **trainer_state})

    def checked_groups(
        self, number: int, catalog: ParameterCatalog, content: Mapping[str, Any]
    ) -> list[list[dict[str, Any]]]:
        with fail_together():
            saved = content.get(OPTIMIZERS, [])
            check_num_optimizers(self.path, len(saved), number)
            for index, (state, groups) in enumerate(zip(saved, catalog.optimizer_groups, strict=True)):
                check_group_sizes(self.path, index, [len(group["params"]) for group in state["param_groups"]], groups)
        return [state["param_groups"] for state in saved]

    def own_states(
        self, part: RankPart, parameters: Mapping[str, Parameter], content: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        for state, groups in zip(content[OPTIMIZERS], part.catalog.optimizer_groups, strict=True):
            numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
            names = dict(zip(numbers, chain.from_iterable(groups), strict=True))
            yield {
                names[number]: shard_like(kept, parameters[names[number]], part.cuts.parts.get(names[number]))
                for number, kept in state["state"].items()
                if names[number] in parameters
            }
