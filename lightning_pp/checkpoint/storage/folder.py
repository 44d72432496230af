"""A checkpoint folder appears whole or not at all.

It is written beside its final place under a hidden name and takes that place when every rank has finished. What it
replaces stays until then: Linux swaps the two names in one step. Where the file system cannot, the old one is moved
aside for a moment, and moved back by the next load or save if the job died in that moment::

    model.ckpt                 the checkpoint
    .model.ckpt.incomplete     a save in progress, or one that was interrupted
    .model.ckpt.previous       the replaced checkpoint, between two renames

Inside, ``meta.pt`` (Lightning's name for it) has what the Trainer keeps beside model and optimizers, ``*.distcp`` the
shards, and ``.metadata``, which torch.distributed.checkpoint writes when all ranks are done, the table of what is
where. Folders at URLs, where nothing can be renamed, are :mod:`.remote_folder`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from upath import UPath

from lightning_pp.checkpoint.storage.location import Location, file_sizes, is_file, locate
from lightning_pp.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

TRAINER_STATE_FILENAME = "meta.pt"
TABLE_FILENAME = ".metadata"


def checkpoint_at(path: str | os.PathLike[str] | UPath) -> Location:
    """The location of a checkpoint; a table of contents stands for the folder that it is in.

    Raises:
        CheckpointError: It is a URL that cannot be opened.
    """
    location = locate(path)
    return location.parent if location.name == TABLE_FILENAME else location


def is_sharded_checkpoint(path: Location) -> bool:
    """Whether this is a folder that a sharded checkpoint was saved to, complete or not."""
    return any(is_file(path / name) for name in (TABLE_FILENAME, TRAINER_STATE_FILENAME))


def staging_path(path: Path) -> Path:
    """Where a save writes, beside its final place and so on the same file system."""
    return path.with_name(f".{path.name}.incomplete")


def begin(path: Path) -> None:
    """On the root: make an empty staging folder for ``path``."""
    recover(path)
    remove(staging_path(path))
    staging_path(path).mkdir(parents=True)


def commit(path: Path) -> None:
    """On the root: put the staged folder in its place."""
    staged, previous = staging_path(path), _previous_path(path)
    remove(previous)
    if not os.path.lexists(path):
        staged.rename(path)
    elif not _swap(staged, path):
        path.rename(previous)
        staged.rename(path)
    _sync(path.parent)
    remove(previous)
    remove(staged)


def abandon(path: Path) -> None:
    """On the root: remove what a failed save has written."""
    shutil.rmtree(staging_path(path), ignore_errors=True)


def recover(path: Location) -> None:
    """On the root: undo the first of the two renames if the job died between them."""
    if not isinstance(path, Path):
        return  # nothing is renamed there
    previous = _previous_path(path)
    if previous.exists() and not path.exists():
        previous.rename(path)


def check_complete(path: Location, table: Metadata) -> None:
    """Find missing and truncated files.

    Raises:
        CheckpointError: Names the file.
    """
    sizes = file_sizes(path)
    for name, end in sorted(sizes_needed(table).items()):
        file = path / name
        if name not in sizes:
            raise CheckpointError(f"{file} is missing, so the checkpoint {path} cannot be loaded; use another one")
        if (size := sizes[name]) != end:
            what, least = ("damaged", "") if size > end else ("truncated", "at least ")
            raise CheckpointError(
                f"{file} is {what}: it has {size} bytes, but {least}{end} were written. The checkpoint {path} cannot "
                "be loaded; use another one"
            )


def sizes_needed(table: Metadata) -> dict[str, int]:
    """By the name of each file of tensors, the bytes that it has at least."""
    ends: dict[str, int] = {}
    for stored in (table.storage_data or {}).values():
        end = stored.offset + stored.length
        ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    return ends


def check_finished(path: Location) -> None:
    """Refuse a folder whose save did not finish.

    Raises:
        CheckpointError: Names the file that is missing.
    """
    for name in (TABLE_FILENAME, TRAINER_STATE_FILENAME):
        if not is_file(path / name):
            raise CheckpointError(
                f"{path} is not a complete checkpoint: {path / name} is missing, so its save was interrupted or it is "
                "another kind of folder; use another checkpoint"
            )


def _swap(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    # Python has no call for it. Between two renames, a reader in another process would find nothing and undo the first.
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    at_working_folder, exchange = -100, 2
    arguments = (at_working_folder, os.fsencode(first), at_working_folder, os.fsencode(second), exchange)
    return int(renameat2(*arguments)) == 0


def _previous_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make renames in a folder survive a crash of the machine, where folders can be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
