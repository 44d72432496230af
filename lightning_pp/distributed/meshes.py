"""The device mesh of a strategy."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_pp.distributed._torch_private import flattened
from lightning_pp.distributed.groups import destroyed_with
from lightning_pp.distributed.loopback import gloo_on_loopback
from lightning_pp.distributed.sizes import ParallelSizes

PIPELINE, DATA_PARALLEL, TENSOR_PARALLEL = "pipeline", "data_parallel", "tensor_parallel"
HSDP_AXES = ("data_parallel_replicate", "data_parallel_shard")
_SAME_STAGES = "same_stages"


@gloo_on_loopback()
def make_meshes(device_type: str, sizes: ParallelSizes) -> tuple[DeviceMesh, DeviceMesh]:
    """The whole mesh, and of it the data-parallel ranks at this rank's place in the pipeline as one axis."""
    has_copies = sizes.data_parallel_replicate > 1
    axes = {PIPELINE: sizes.pipeline}
    if has_copies:
        axes |= dict(zip(HSDP_AXES, (sizes.data_parallel_replicate, sizes.data_parallel_shard), strict=True))
    else:
        axes[DATA_PARALLEL] = sizes.data_parallel
    if sizes.tensor > 1:
        axes[TENSOR_PARALLEL] = sizes.tensor
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    data_parallel = flattened(mesh[HSDP_AXES], DATA_PARALLEL) if has_copies else mesh[DATA_PARALLEL]
    made = [mesh, data_parallel, *([same_stages(mesh)] if sizes.tensor > 1 else [])]
    groups = [each.get_group(axis) for each in made for axis in range(each.ndim)]
    destroyed_with(mesh, [group for group in groups if group is not dist.group.WORLD])
    return mesh, data_parallel


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Of the whole mesh, what the parameters at this rank's place are sharded over: (shard) or (replicate, shard)."""
    names = mesh.mesh_dim_names or ()
    return mesh[HSDP_AXES] if HSDP_AXES[0] in names else mesh[DATA_PARALLEL]


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Of the whole mesh, the ranks that hold parts of this rank's matrices; None without tensor parallelism."""
    return mesh[TENSOR_PARALLEL] if TENSOR_PARALLEL in (mesh.mesh_dim_names or ()) else None


def same_stages(mesh: DeviceMesh) -> DeviceMesh:
    """Of the whole mesh, the ranks at this rank's place in the pipeline, of all replicas and tensor ranks, as one."""
    axes = (mesh.mesh_dim_names or ())[1:]
    return mesh[DATA_PARALLEL] if TENSOR_PARALLEL not in axes else flattened(mesh[axes], _SAME_STAGES)


def groups_of_collectives(mesh: DeviceMesh, data_parallel: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups that collectives go through: of all ranks, and of the meshes those that are not along the pipeline."""
    world = dist.group.WORLD
    assert world is not None
    sharding = sharding_mesh(mesh)
    axes = [sharding.get_group(axis) for axis in range(sharding.ndim)]
    tensor = tensor_mesh(mesh)
    of_tensor = [] if tensor is None else [tensor.get_group(), same_stages(mesh).get_group()]
    return list(dict.fromkeys([world, *axes, data_parallel.get_group(), *of_tensor]))


@gloo_on_loopback()
def replicating(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of ``mesh`` as (replicate, shard) with one shard; every rank of it has to call."""
    ranks = mesh.mesh.flatten().unsqueeze(1)
    alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="one_shard")
    return DeviceMesh.from_group([mesh.get_group(), alone], mesh.device_type, ranks, mesh_dim_names=HSDP_AXES)
