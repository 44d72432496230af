"""A checkpoint folder at a URL, where nothing can be renamed: its table of contents lists what belongs to it.

The table is written last, in one put, so a folder without one is not a checkpoint. What a save writes has names of its
own, by the id of the save, and what it replaces is removed afterwards::

    model.ckpt/<id>__0_0.distcp     shards of all ranks
    model.ckpt/meta-<id>.pt         what the Trainer keeps beside model and optimizers
    model.ckpt/.metadata            the table, which names the id: from here on the checkpoint is the new one
    model.ckpt/meta.pt              a copy under Lightning's name, for its tools
"""

from __future__ import annotations

import logging
import pickle
import re
from typing import TYPE_CHECKING

from upath import UPath

from lightning_pp.checkpoint.storage.checksums import sealed
from lightning_pp.checkpoint.storage.folder import TABLE_FILENAME, TRAINER_STATE_FILENAME, sizes_needed
from lightning_pp.checkpoint.storage.location import Location, file_sizes, is_file, naming, put
from lightning_pp.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_WRITTEN_BY_SAVES = re.compile(r"[0-9a-f-]{36}__\d+_\d+\.distcp|meta-[0-9a-f-]{36}\.pt|__\d+_\d+\.distcp")
_log = logging.getLogger(__name__)


def begin(path: UPath) -> None:
    """On the root: make the folder, where there are folders; a file of that name is removed.

    Raises:
        CheckpointError: The storage cannot be written to.
    """
    with naming(path, "written"):
        if is_file(path):
            path.fs.rm_file(path.path)
        path.fs.makedirs(path.path, exist_ok=True)


def stage(path: UPath, save_id: str, trainer_state: bytes, table: Metadata) -> None:
    """On the root: complete what the ranks have written, but for the table.

    Raises:
        CheckpointError: A shard is not there, or the storage cannot be written to.
    """
    sizes = file_sizes(path)
    for name, needed in sorted(sizes_needed(table).items()):
        if sizes.get(name, -1) < needed:
            raise CheckpointError(
                f"A rank has just written {path / name}, but the first rank cannot see it. Sharded checkpoints need "
                "storage that all processes share, and each process has a memory:// of its own. Choose another URL, "
                "or set save_distributed_checkpoint=False"
            )
    put(trainer_state, path / _trainer_state_name(save_id))


def commit(path: UPath, save_id: str, trainer_state: bytes, table: Metadata) -> None:
    """On the root: let the folder be the new checkpoint, and remove what is left of the one before.

    Raises:
        CheckpointError: The table could not be written.
    """
    put(sealed(pickle.dumps(table)), path / TABLE_FILENAME)
    try:
        put(trainer_state, path / TRAINER_STATE_FILENAME)
        _remove(path, [name for name in file_sizes(path) if _is_written_by_save(name) and save_id not in name])
    except Exception as error:
        _log.warning(
            f"{path} is saved, but cleaning up failed, so files of the previous checkpoint may be left: {error}"
        )


def abandon(path: UPath, save_id: str) -> None:
    """On the root: remove what a failed save has written, as far as that is possible."""
    try:
        _remove(path, [name for name in file_sizes(path) if _is_written_by_save(name) and save_id in name])
    except Exception as error:
        _log.warning(f"Files of a failed save could not be removed from {path}: {error}")


def remove_folder(path: UPath) -> None:
    """Remove a checkpoint, its table first, so that none that is half there is taken for one.

    Raises:
        CheckpointError: The storage cannot be written to.
    """
    _remove(path, [TABLE_FILENAME])
    with naming(path, "removed"):
        path.fs.rm(path.path, recursive=True)


def trainer_state_file(path: Location, table: Metadata) -> Location:
    """The file with what the Trainer keeps, of the save that wrote the table."""
    save_id = table.storage_meta.save_id if table.storage_meta else None
    named = path / _trainer_state_name(save_id or "")
    return named if save_id and is_file(named) else path / TRAINER_STATE_FILENAME


def _trainer_state_name(save_id: str) -> str:
    return f"meta-{save_id}.pt"


def _is_written_by_save(name: str) -> bool:
    return _WRITTEN_BY_SAVES.fullmatch(name) is not None


def _remove(path: UPath, names: list[str]) -> None:
    for name in names:
        with naming(path / name, "removed"):
            if is_file(path / name):
                path.fs.rm_file((path / name).path)
