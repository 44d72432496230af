"""The memory bandwidth of devices, beside their FLOP/s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class PlannedDevice:
    """The device of the plan, and the device on which planning runs.

    Attributes:
        type: Of the device that is planned for.
        flops_per_byte: FLOPs that it does in the time in which its memory moves a byte; 0: not known.
        here: Where the step is recorded, the batch lies, and units run that are measured; one of this machine.
    """

    type: str = "cpu"
    flops_per_byte: float = 0.0
    here: torch.device = _CPU


PLANNED_ON_CPU = PlannedDevice()

EFFICIENCY = 0.4
"""The share of its peak FLOP/s that a device is taken to reach."""
SHARE_OF_BANDWIDTH = 0.8
"""The share of the bandwidth of its memory that a device is taken to reach."""

# Bytes per second by the makers' data sheets, in 10⁹; names as Lightning has them for FLOP/s. An A100 has 1935 (PCIe)
# or 2039 (SXM) with 80 GB.
_GB_PER_S = {
    "h200 sxm1": 4800,
    "h200 nvl1": 4800,
    "h100 sxm": 3350,
    "h100 pcie": 2000,
    "rtx 4090": 1008,
    "rtx 4080": 717,
    "rtx 4080 super": 736,
    "l4": 300,
    "l40": 864,
    "a100": 1555,
    "a6000": 768,
    "a40": 696,
    "a10g": 600,
    "rtx 3090 ti": 1008,
    "rtx 3090": 936,
    "rtx 3080 ti": 912,
    "rtx 3080": 760,
    "rtx 3070": 448,
    "t4": 320,
    "quadro rtx 5000": 448,
    "rtx 2080 super": 496,
    "rtx 2080 ti": 616,
    "rtx 2080": 448,
    "rtx 2070 super": 448,
    "titan rtx": 672,
    "v100 sxm": 900,
    "v100 pcie": 900,
    "v100s pcie": 1134,
}


def named_bandwidth(name: str) -> float | None:
    """Bytes per second of the memory of a device, by its name in small letters; None if it is not known."""
    found = _GB_PER_S.get(name)
    return None if found is None else 1e9 * found


def gpu_bandwidth(device: torch.device) -> float | None:
    """Bytes per second of the memory of a GPU of this machine, by its clock and width; None if it does not say."""
    properties: Any = torch.cuda.get_device_properties(device)
    clock_khz, width_bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    found = 2e3 * float(clock_khz) * float(width_bits) / 8  # two transfers a cycle
    return found or None


def flops_per_byte(peak_flops_per_s: float | None, bandwidth: float | None) -> float:
    """FLOPs that a device does in the time in which its memory moves a byte, both as they are usually reached.

    Args:
        peak_flops_per_s: Its peak.
        bandwidth: Of its memory, bytes per second.

    Returns:
        0 where one of them is not known.
    """
    if peak_flops_per_s is None or bandwidth is None:
        return 0.0
    return EFFICIENCY * peak_flops_per_s / (SHARE_OF_BANDWIDTH * bandwidth)


def dtype_of_precision(precision: Any) -> torch.dtype:
    """What matrices are multiplied in under ``trainer.precision``."""
    text = str(precision)
    if text.startswith(("bf16", "bfloat16")):
        return torch.bfloat16
    if text.startswith(("16", "half")):
        return torch.float16
    return torch.float64 if text.startswith("64") else torch.float32
