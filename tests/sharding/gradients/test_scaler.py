"""The scale of losses, agreed by ranks that hold different gradients; on the CPU, where the logic is the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pool import WorkerPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_pp.sharding.gradients.clip import clip_by_norm_
from lightning_pp.sharding.gradients.scaler import AgreeingGradScaler

INITIAL, GROWTH_INTERVAL = 8.0, 2


def stage_steps(bad: dict[int, int], clip: float | None) -> dict[str, Any]:
    """Each rank is a stage with weights of its own; the last one's are sharded by FSDP2 on a mesh of one.

    In step ``s`` the gradient of rank ``bad[s]`` has an infinity in it. Rank 1 has no gradient at all in step 3.
    """
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    layer = nn.Linear(3, 3)
    meshes = [init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("stage", "shard"))]
    if rank == torch.distributed.get_world_size() - 1:
        fully_shard(layer, mesh=meshes[0]["shard"])
    before = [local(p).clone() for p in layer.parameters()]
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    plain = torch.amp.GradScaler("cpu", init_scale=INITIAL, growth_interval=GROWTH_INTERVAL)
    scaler = AgreeingGradScaler.taking_over(plain)
    scales, moved, norms = [], [], []
    for step in range(6):
        scaler.scale(torch.ones(()))
        for parameter in layer.parameters():
            gradient = torch.full(local(parameter).shape, scaler.get_scale())  # unscaled it is 1
            if bad.get(step) == rank:
                gradient.view(-1)[0] = math.inf
            parameter.grad = None if step == 3 and rank == 1 else like(parameter, gradient)
        scaler.unscale_(optimizer)
        if clip is not None:
            norms.append(float(clip_by_norm_([(p, True) for p in layer.parameters()], clip)))
        scaler.step(optimizer)
        scaler.update()
        after = [local(p).clone() for p in layer.parameters()]
        moved.append(float((before[0] - after[0]).max()))
        before = after
        scales.append(scaler.get_scale())
    return {"scales": scales, "moved": moved, "norms": norms, "state": scaler.state_dict()}


def local(parameter: Any) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def like(parameter: Any, gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return DTensor.from_local(gradient, parameter.device_mesh, parameter.placements)
    return gradient


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_an_infinity_anywhere_skips_the_step_everywhere(pool: WorkerPool, bad_rank: int) -> None:
    results = pool.run(stage_steps, {1: bad_rank, 4: 1}, None, world_size=3, process_group=True)
    # grows after two good steps, halves after a bad one
    expected = [INITIAL, INITIAL / 2, INITIAL / 2, INITIAL, INITIAL / 2, INITIAL / 2]
    for rank, result in enumerate(results):
        assert result["scales"] == expected
        assert result["moved"] == pytest.approx([1, 0, 1, 0 if rank == 1 else 1, 0, 1])
        assert result["state"] == results[0]["state"]


def test_clipping_sees_unscaled_gradients(pool: WorkerPool) -> None:
    results = pool.run(stage_steps, {}, 1.0, world_size=3, process_group=True)
    for result in results:
        assert result["norms"][:3] == pytest.approx([6.0] * 3)  # 3 ranks of 12 ones
        assert result["moved"][:3] == pytest.approx([1 / 6] * 3, rel=1e-5)


def test_only_torch_scalers_are_taken_over() -> None:
    class Own(torch.amp.GradScaler):
        pass

    assert AgreeingGradScaler.can_take_over(torch.amp.GradScaler("cpu"))
    assert not AgreeingGradScaler.can_take_over(Own("cpu"))
