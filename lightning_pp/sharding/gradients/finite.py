"""Whether tensors are finite, by one reduction over them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from lightning_pp.sharding._torch_private import sparse_values
from lightning_pp.sharding.units.flat import local_tensor


@torch.no_grad()
def norms_by_device(tensors: Iterable[Tensor]) -> list[Tensor]:
    """For each device its tensors' 2-norm, 0-d, without waiting for it: finite for no tensor that is not.

    Args:
        tensors: As those of :func:`are_finite`.
    """
    return [get_total_norm(values) for values in _by_device(tensors).values()]


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of what this rank holds of ``tensors`` are finite; waits for the devices.

    The 2-norm tells, which reads each element once and is finite for no tensor that is not. Where it has overflowed,
    the greatest absolute value tells, which takes longer.

    Args:
        tensors: Of any shapes and dtypes, on any devices. Shards count for DTensors, and their values for sparse ones.
    """
    return all(
        any(math.isfinite(float(get_total_norm(values, norm_type))) for norm_type in (2.0, math.inf))
        for values in _by_device(tensors).values()
    )


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        local = local_tensor(tensor)
        values = sparse_values(local) if local.is_sparse else local
        if values.numel() > 0 and (values.is_floating_point() or values.is_complex()):
            by_device.setdefault(values.device, []).append(values)
    return by_device
