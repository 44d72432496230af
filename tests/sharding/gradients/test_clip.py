"""Clipping over stages and shards against torch's clipping of the whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from sharding_run import CollectiveCounter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_pp.sharding.fsdp import ShardedUnits
from lightning_pp.sharding.gradients.clip import clip_by_norm_, clip_by_value_, global_norm
from lightning_pp.sharding.gradients.shared import SharedParameters

NORM_TYPES = (2.0, 1.0, 3.5, math.inf, -math.inf, -1.0)


class _Whole(nn.Module):
    """Two stages that share ``tied``; ``direct`` is left whole, ``unused`` has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(4, 7)
        self.tied = nn.Linear(2, 5, bias=False)
        self.direct = nn.Parameter(torch.zeros(3))
        self.unused = nn.Linear(2, 2)


def whole_model(special: float | None, scale: float) -> _Whole:
    generator = torch.Generator().manual_seed(3)
    model = _Whole().double()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
    model.unused.zero_grad()
    if special is not None:
        model.second.weight.grad[6, 2] = special
    return model


def set_gradients(model: _Whole, expected: _Whole) -> None:
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        if other.grad is None:
            continue
        if isinstance(parameter, DTensor):
            gradient = torch.zeros_like(parameter)
            shards = other.grad.split(-(-other.shape[0] // parameter.device_mesh.size(-1)))
            rank = parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
            if rank < len(shards):
                gradient.to_local().copy_(shards[rank])
            parameter.grad = gradient.detach()
        else:
            parameter.grad = other.grad.clone()


CASES = [
    *((None, 1.0, norm_type) for norm_type in NORM_TYPES),
    (None, 1e-3, 2.0),
    *((special, 1.0, p) for special in (math.nan, math.inf, -math.inf) for p in (2.0, math.inf, -math.inf)),
]


def clipped(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    names = ("pipeline", "replicate", "shard") if len(shape) == 3 else ("pipeline", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = mesh[names[1:]] if len(shape) == 3 else mesh["shard"]
    stage = mesh.get_local_rank("pipeline")
    model = whole_model(None, 1.0)
    mine = [[model.first, model.tied], [model.second, model.tied]][stage] if shape[0] == 2 else list(model.children())
    if data.size() > 1:
        ShardedUnits({str(index): unit for index, unit in enumerate(mine)}, mesh=data)
    owned = [parameter for unit in mine for parameter in unit.parameters()]
    if stage == 0:
        owned = [model.direct, *owned]
    holders = [dist.get_rank() % data.size() + data.size() * s for s in range(shape[0])]
    shared = SharedParameters({"tied": model.tied.weight}, {"tied": holders})
    results = []
    for special, scale, norm_type in CASES:
        expected = whole_model(special, scale)
        set_gradients(model, expected)
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0, norm_type)
        with CollectiveCounter() as collective:
            counted = [(parameter, shared.counts_here(parameter)) for parameter in owned]
            mine_norm = clip_by_norm_(counted, 1.0, mesh=data, norm_type=norm_type)
        results.append(
            {
                "norm": mine_norm.item(),
                "expected": norm.item(),
                "gradient error": gradient_error(model, expected, owned),
                "collectives": dict(collective.counts),
            }
        )
    return results


def gradient_error(model: _Whole, expected: _Whole, owned: list[nn.Parameter]) -> float:
    wanted = dict(expected.named_parameters())
    worst = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not any(parameter is other for other in owned):
            continue
        gradient = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
        difference = wanted[name].grad.nan_to_num(nan=7.0) - gradient.nan_to_num(nan=7.0)
        worst = max(worst, difference.abs().max().item())
    return worst


def all_clipped(shapes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    return [result for shape in shapes for result in clipped(shape)]


@pytest.mark.parametrize(
    ("world_size", "shapes"),
    [(1, [(1, 1)]), (2, [(2, 1), (1, 2)]), (4, [(2, 2), (1, 2, 2)])],
    ids=["alone", "two", "four"],
)
def test_clipping_is_that_of_the_whole_model(pool: WorkerPool, world_size: int, shapes: list[tuple[int, ...]]) -> None:
    for results in pool.run(all_clipped, shapes, world_size=world_size, process_group=True):
        for result in results:
            assert result["norm"] == pytest.approx(result["expected"], rel=1e-12, abs=0, nan_ok=True)
            assert result["gradient error"] < 1e-12
            assert result["collectives"] == ({} if world_size == 1 else {"allreduce": 1})


def by_value() -> float:
    expected = whole_model(None, 1.0)
    torch.nn.utils.clip_grad_value_(expected.parameters(), 0.5)
    model = whole_model(None, 1.0)
    ShardedUnits({"second": model.second}, mesh=init_device_mesh("cpu", (2,)))
    set_gradients(model, whole_model(None, 1.0))
    with CollectiveCounter() as collective:
        clip_by_value_(model.parameters(), 0.5)
    assert collective.counts == {}
    return max(
        ((p.grad.full_tensor() if isinstance(p, DTensor) else p.grad) - q.grad).abs().max().item()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True)
        if q.grad is not None
    )


def test_clipping_by_value(pool: WorkerPool) -> None:
    assert pool.run(by_value, world_size=2, process_group=True) == [0.0, 0.0]


def half_precision() -> tuple[float, float]:
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parameter.grad = torch.full((1000,), 0.01, dtype=torch.bfloat16)
    return global_norm([(parameter, dist.get_rank() == 0)]).item(), parameter.grad.double().norm().item()


def test_the_norm_of_half_precision_is_accurate(pool: WorkerPool) -> None:
    for norm, expected in pool.run(half_precision, world_size=2, process_group=True):
        assert norm == pytest.approx(expected, rel=1e-6)


def test_zero_is_no_norm_type() -> None:
    with pytest.raises(ValueError, match="norm_type=0"):
        global_norm([], norm_type=0)
