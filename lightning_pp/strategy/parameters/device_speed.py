"""The speed of this rank's device, by Lightning's and torch's tables."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_pp.planning.hardware.devices import dtype_of_precision, flops_per_byte, gpu_bandwidth


def peak_flops_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU of this machine at most, by Lightning's table; None where it has no number."""
    with warnings.catch_warnings(), suppress(Exception):  # it warns, or raises, of devices that it does not know
        warnings.simplefilter("ignore")
        return get_available_flops(device, dtype)
    return None


def flops_per_byte_of(device: torch.device, precision: Any) -> float:
    """FLOPs that a device computes while its memory moves a byte; 0 if that is not known.

    Args:
        device: Where this rank computes.
        precision: ``trainer.precision``.
    """
    if device.type != "cuda":
        return 0.0
    return flops_per_byte(peak_flops_of(device, dtype_of_precision(precision)), gpu_bandwidth(device))
