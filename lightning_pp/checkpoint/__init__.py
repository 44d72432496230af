"""Checkpoints of a pipeline: sharded folders and single files, by the names that the unsplit module has.

Both formats load under any layout: another pipeline size, another data-parallel size, sharded or replicated parameters.
A single file is what a Trainer on one device writes and reads. Most names are imported when they are first used, since
torch.distributed.checkpoint takes long to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.rank_part import RankPart

if TYPE_CHECKING:
    from lightning_pp.checkpoint.reading.initial_weights import load_weights
    from lightning_pp.checkpoint.reading.newest_good import NewestGood, checkpoints_in, newest_good
    from lightning_pp.checkpoint.reading.open import open_checkpoint, read_alone
    from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint, load_state
    from lightning_pp.checkpoint.writing.background import BackgroundSaver
    from lightning_pp.checkpoint.writing.sharded import ShardedSave, make_stager, prepare_save
    from lightning_pp.checkpoint.writing.single_file import (
        gather_full_optimizer_state,
        gather_full_state,
        make_room_for_file,
    )

__all__ = [
    "BackgroundSaver",
    "NewestGood",
    "OpenedCheckpoint",
    "ParameterCatalog",
    "RankPart",
    "ShardedSave",
    "checkpoints_in",
    "gather_full_optimizer_state",
    "gather_full_state",
    "load_state",
    "load_weights",
    "make_room_for_file",
    "make_stager",
    "newest_good",
    "open_checkpoint",
    "prepare_save",
    "read_alone",
]

_FILES = {
    "reading.initial_weights": ("load_weights",),
    "reading.newest_good": ("NewestGood", "checkpoints_in", "newest_good"),
    "reading.open": ("open_checkpoint", "read_alone"),
    "reading.opened": ("OpenedCheckpoint", "load_state"),
    "writing.background": ("BackgroundSaver",),
    "writing.sharded": ("ShardedSave", "make_stager", "prepare_save"),
    "writing.single_file": ("gather_full_optimizer_state", "gather_full_state", "make_room_for_file"),
}


def __getattr__(name: str) -> Any:
    """A public name, imported now."""
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
