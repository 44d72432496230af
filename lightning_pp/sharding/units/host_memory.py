"""Memory of the host that this process has freed and the C library still keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def _malloc_trim() -> Callable[[int], Any] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def return_freed_memory() -> None:
    """Gives freed memory back to the system, where the C library can (glibc).

    Once a large block was freed, glibc takes blocks of up to 32 MiB from a heap whose holes it keeps. Whole units that
    are made, sharded and freed one after the other leave holes that small objects keep the next unit from fitting into:
    without this, a process ends with several times the memory of its shards.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
