"""The private names of torch that the callbacks use; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_pp._private_names import private

_record_memory_history: Any = private("torch.cuda.memory._record_memory_history")
_dump_snapshot: Any = private("torch.cuda.memory._dump_snapshot")


def record_memory(max_entries: int) -> None:
    """Records allocations of CUDA memory from here on, the latest ``max_entries``, with where they were made."""
    _record_memory_history(max_entries=max_entries)


def stop_recording_memory() -> None:
    """Forgets what was recorded, and records no more."""
    _record_memory_history(enabled=None)


def write_memory_snapshot(path: Path) -> None:
    """Writes what CUDA memory holds, and what was recorded, for https://pytorch.org/memory_viz."""
    _dump_snapshot(str(path))
