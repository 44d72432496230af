"""Checkpoints of a pipeline: sharded folders and single files, by the names that the unsplit module has.

Both formats load under any layout: another pipeline size, another data-parallel size, sharded or replicated parameters.
A single file is what a Trainer on one device writes and reads.
"""

from __future__ import annotations

from lightning_pp.checkpoint.catalog import ParameterCatalog
from lightning_pp.checkpoint.full import gather_full_optimizer_state, gather_full_state, load_full
from lightning_pp.checkpoint.load import load_checkpoint
from lightning_pp.checkpoint.local import local_state_dict
from lightning_pp.checkpoint.sharded import is_sharded_checkpoint, load_sharded, save_sharded

__all__ = [
    "ParameterCatalog",
    "gather_full_optimizer_state",
    "gather_full_state",
    "is_sharded_checkpoint",
    "load_checkpoint",
    "load_full",
    "load_sharded",
    "local_state_dict",
    "save_sharded",
]
