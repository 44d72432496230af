"""A small model with sharded and whole parameters, and the same gradients for it as for a whole one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_pp.sharding.fsdp import ShardedUnits


class SmallModel(nn.Module):
    """``narrow`` has fewer rows than there are shards, ``whole`` is not sharded, ``unused`` gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.wide = nn.Linear(5, 7)
        self.narrow = nn.Linear(3, 1)
        self.whole = nn.Linear(2, 3)
        self.unused = nn.Linear(2, 2)
        self.double()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def give_gradients(model: SmallModel, seed: int) -> None:
    """The same gradients for a sharded and a whole model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.startswith("unused"):
            continue
        if isinstance(parameter, DTensor):
            sharded = torch.zeros_like(parameter).detach()
            size = parameter.device_mesh.size(-1)
            shards = gradient.split(-(-gradient.shape[0] // size))
            rank = parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
            if rank < len(shards):
                sharded.to_local().copy_(shards[rank])
            parameter.grad = sharded
        else:
            parameter.grad = gradient


def sharded_model(shape: tuple[int, ...]) -> SmallModel:
    model = SmallModel()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    ShardedUnits({name: getattr(model, name) for name in ("wide", "narrow", "unused")}, mesh=mesh)
    return model


def groups(model: SmallModel) -> list[dict[str, Any]]:
    """Sharded and whole parameters in one group, and a group of its own for a rate of its own."""
    slow = [model.narrow.weight]
    rest = [parameter for parameter in model.parameters() if parameter is not slow[0]]
    return [{"params": rest}, {"params": slow, "lr": 0.003}]
