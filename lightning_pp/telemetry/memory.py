"""The most memory that a rank has held."""

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


def _peak_resident_bytes() -> int:
    # getrusage also counts what the process that launched this one held at that moment, so Linux's own figure is better
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
