"""``ckpt_path="last"``: at URLs, and where the last checkpoint is damaged.

Lightning lists the folder, and takes the names in it for local paths. It also asks for the age of what it finds, which
folders in object stores have none of: there, the table of contents stands for the checkpoint. It is written last, so a
folder without one is not a checkpoint.

Lightning looks for the checkpoint before the processes can speak with each other. So what it found is only noted there
(``strategy.last_checkpoints``), and compared with its checksums when it is about to be loaded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together_if_several, from_root
from lightning_pp.checkpoint.storage.folder import TABLE_FILENAME, checkpoint_at
from lightning_pp.checkpoint.storage.location import Location, is_file, is_folder, is_remote, is_url, locate, names_in
from lightning_pp.strategy._lightning_private import folder_of
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy


def good_one(noted: set[str], path: str | Path, weights_only: bool | None, ranks: Ranks | None) -> str | Path:
    """What to load in place of ``path``: itself, or the newest good one beside it if it was found as the last.

    All of the checkpoint is compared with its checksums. A path that the user named is returned as it is.

    Args:
        noted: The folders searched for ``ckpt_path="last"``. Emptied: a path that is loaded from now on is one
            that the user named.
        path: What Lightning is about to load; the root's counts.
        weights_only: As in ``torch.load``.
        ranks: All ranks, of which each reads its share; None for a process alone.

    Raises:
        CheckpointError: On all ranks: no checkpoint there is good; names all of them.
    """
    folders = set(noted)
    noted.clear()
    if ranks is not None:
        path, folders = from_root((str(path), folders), ranks)
    here = checkpoint_at(path)
    if str(here.parent if is_remote(here) else here.absolute().parent) not in {
        str(locate(folder)) for folder in folders
    }:
        return path
    from lightning_pp.checkpoint.reading.newest_good import checkpoints_in, newest_good

    candidates = [here]
    with fail_together_if_several(ranks):
        if ranks is None or ranks.is_root:
            target = _target(candidates[0])
            near = _target(here.parent)
            beside = [other for other in checkpoints_in(here.parent) if _target(other.parent) == near]
            candidates += [other for other in beside if _target(other) != target]
    found = newest_good(candidates, weights_only=weights_only, ranks=ranks)
    if not found.damaged:
        return path
    reasons = "\n".join(f"- {reason}" for _, reason in found.damaged)
    rank_zero_warn(
        f"ckpt_path='last' takes {found.path}, because newer checkpoints cannot be read ({len(found.damaged)}). "
        f"Training repeats the steps since then.\n{reasons}"
    )
    return str(found.path)


def _target(location: Location) -> str:
    return os.path.realpath(location) if isinstance(location, Path) else str(location)


def last_at_url(callback: ModelCheckpoint, trainer: pl.Trainer) -> set[str] | None:
    """The files, and tables of complete folders, that may be the last checkpoint; None where Lightning is to look."""
    if not isinstance(trainer.strategy, MeshStrategy):
        return None
    folder = str(folder_of(callback, trainer))
    noted = getattr(trainer.strategy, "last_checkpoints", None)
    if isinstance(noted, set):
        noted.add(folder if is_url(folder) else os.path.abspath(folder))
    if not is_url(folder) or not is_remote(location := locate(folder)):
        return None
    pattern = re.compile(rf"{re.escape(callback.CHECKPOINT_NAME_LAST)}(-\d+)?.*{re.escape(callback.FILE_EXTENSION)}")
    found = set()
    for name in names_in(location):
        if pattern.fullmatch(name) is None:
            continue
        checkpoint = location / name
        if not is_folder(checkpoint):
            found.add(str(checkpoint))
        elif is_file(checkpoint / TABLE_FILENAME):
            found.add(str(checkpoint / TABLE_FILENAME))
    return found
