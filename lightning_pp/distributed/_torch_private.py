"""The private names of torch that this layer uses; nothing else in it uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_pp._private_names import private, uses

_world = private("torch.distributed.distributed_c10d._world")


@uses("torch.distributed.device_mesh.DeviceMesh._flatten")
def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """``mesh`` as one dimension ``name``, which the mesh that it is part of knows by that name from then on.

    Single numbers go through its group. One of all ranks is the world's.
    """
    is_nccl = dist.get_backend() == "nccl" and mesh.size() < dist.get_world_size()
    return mesh._flatten(name, few_ctas() if is_nccl else None)


@uses("torch.Tensor._indices", "torch.Tensor._values")
def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse tensor, also of one that is not coalesced, as they lie in it."""
    return [tensor._indices(), tensor._values()]


def channel_options(name: str, timeout: timedelta) -> Any:
    """Of a channel over NCCL, whose work goes before the computation, and takes at most four multiprocessors."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout, options.group_name = timeout, name
    options.config.min_ctas, options.config.max_ctas = 1, 4
    return options


def few_ctas() -> Any:
    """Options of a group over NCCL through which single numbers go: it takes at most two multiprocessors."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, 2
    return options


def process_groups() -> list[dist.ProcessGroup]:
    """All groups that this process is in."""
    return list(_world.pg_names)
