"""``ckpt_path="last"`` where checkpoints are at a URL.

Lightning lists the folder, and takes the names in it for local paths. It also asks for the age of what it finds, which
folders in object stores have none of: there, the table of contents stands for the checkpoint. It is written last, so a
folder without one is no checkpoint.
"""

from __future__ import annotations

import re

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pp.checkpoint.storage.folder import TABLE_FILENAME
from lightning_pp.checkpoint.storage.location import is_file, is_folder, is_remote, is_url, locate, names_in
from lightning_pp.strategy._lightning_private import folder_of, replace_search_for_last
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy


def find_last_at_urls() -> None:
    """Has each :class:`ModelCheckpoint` of a pipeline find its last checkpoints at URLs; done once for all."""
    replace_search_for_last(_last_at_url)


def _last_at_url(callback: ModelCheckpoint, trainer: pl.Trainer) -> set[str] | None:
    """The files, and tables of complete folders, that may be the last checkpoint; None where Lightning is to look."""
    if not isinstance(trainer.strategy, MeshStrategy):
        return None
    folder = str(folder_of(callback, trainer))
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
