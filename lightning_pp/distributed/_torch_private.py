"""The private names of torch that this layer uses; nothing else in it uses any.

What the installed version lacks is told where it is used.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from lightning_pp._private_names import private, uses

_world = private("torch.distributed.distributed_c10d._world")


@uses("torch.distributed.device_mesh.DeviceMesh._flatten")
def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """``mesh`` as one dimension ``name``, which the mesh that it is part of knows by that name from then on."""
    return mesh._flatten(name)


@uses("torch.Tensor._indices", "torch.Tensor._values")
def parts_of_sparse(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse tensor, also of one that is not coalesced, as they lie in it."""
    return [tensor._indices(), tensor._values()]


def nccl_of_two(store: Store, place: int, timeout: timedelta) -> Any:
    """NCCL between two ranks, which find each other in ``store``; see :func:`groups.group_of_two`."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, place, 2, options)


def groups_of_process() -> list[dist.ProcessGroup]:
    """All groups that this process is in."""
    return list(_world.pg_names)
