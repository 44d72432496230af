"""Checkpoints of a pipeline: sharded folders and single files, by the names that the unsplit module has.

Both formats load under any layout: another pipeline size, another data-parallel size, sharded or replicated parameters.
A single file is what a Trainer on one device writes and reads.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``newest_good``, imported when it is used, since torch.distributed.checkpoint takes long to import."""
    if name != "newest_good":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_pp.checkpoint.reading.newest_good import newest_good

    return newest_good
