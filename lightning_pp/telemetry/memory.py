"""A rank's current and peak memory on its device."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_GIB = 1024**3


def read_peak_memory_gib(device: torch.device) -> float:
    """The peak of ``device``'s memory, GiB.

    On CUDA: the most that tensors held since the last reading; the count then starts again. On the CPU: the largest
    resident set of this process since it began.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / _GIB
    return _peak_resident_bytes() / _GIB


def read_memory_gib(device: torch.device) -> tuple[float, float]:
    """The allocated and the reserved memory of ``device`` now, GiB.

    On CUDA: what tensors hold, and what torch's allocator has taken from the device. On the CPU both are the resident
    set of this process.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / _GIB, torch.cuda.memory_reserved(device) / _GIB
    status = Path("/proc/self/statm")
    resident = (
        int(status.read_text().split()[1]) * resource.getpagesize() if status.exists() else _peak_resident_bytes()
    )
    return resident / _GIB, resident / _GIB


def _peak_resident_bytes() -> int:
    # getrusage also counts what the process that launched this one held at that moment, so Linux's own figure is better
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
