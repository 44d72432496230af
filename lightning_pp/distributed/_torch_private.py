"""The private names of torch that this layer uses; tried with torch 2.11 to 2.13."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """``mesh`` as one dimension ``name``, which the mesh that it is part of knows by that name from then on."""
    return mesh._flatten(name)
