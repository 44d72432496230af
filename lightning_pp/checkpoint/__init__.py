"""Checkpoints of a pipeline: sharded folders and single files, by the names that the unsplit module has.

Both formats load under any layout: another pipeline size, another data-parallel size, sharded or replicated parameters.
A single file is what a Trainer on one device writes and reads.
"""

from __future__ import annotations

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.local import local_state_dict
from lightning_pp.checkpoint.reading.load import load_checkpoint, open_checkpoint
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint, load_state
from lightning_pp.checkpoint.reading.weights import load_weights
from lightning_pp.checkpoint.writing.background import BackgroundSaver
from lightning_pp.checkpoint.writing.full import gather_full_optimizer_state, gather_full_state
from lightning_pp.checkpoint.writing.sharded import (
    ShardedSave,
    is_sharded_checkpoint,
    make_stager,
    prepare_save,
    save_sharded,
)

__all__ = [
    "BackgroundSaver",
    "OpenedCheckpoint",
    "ParameterCatalog",
    "ShardedSave",
    "gather_full_optimizer_state",
    "gather_full_state",
    "is_sharded_checkpoint",
    "load_checkpoint",
    "load_state",
    "load_weights",
    "local_state_dict",
    "make_stager",
    "open_checkpoint",
    "prepare_save",
    "save_sharded",
]
