"""Parameters on several stages, and parameters that data-parallel ranks hold whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from sharding_run import CollectiveCounter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pp.sharding.fsdp import ShardedUnits
from lightning_pp.sharding.gradients.replicated import ReplicatedGradients, broadcast_values
from lightning_pp.sharding.gradients.shared import SharedParameters
from lightning_pp.split.memory.state_memory import ParameterSize, StateSizes

HOLDERS = {
    "embed.weight": (2, 0),
    "bias.relative": (0, 1, 2),
    "norm.weight": (0, 1, 2),
    "gate": (1,),
    "head.weight": (1, 2),  # rank 2 is in more sets than rank 1
}


def gradient_of(rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + len(name))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def shared(dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any], dict[str, int], dict[str, bool]]:
    """Values and gradients after the exchange; ``norm.weight`` has a gradient on rank 1 only, and ``gate`` on none."""
    rank = dist.get_rank()
    parameters = {
        name: nn.Parameter(torch.full((2, 3), float(rank), dtype=dtype))
        for name, ranks in HOLDERS.items()
        if rank in ranks
    }
    together = SharedParameters(parameters, HOLDERS)
    for name, parameter in parameters.items():
        if name in ("embed.weight", "bias.relative", "head.weight") or (name == "norm.weight" and rank == 1):
            parameter.grad = gradient_of(rank, name, (2, 3), dtype)
    with CollectiveCounter() as collective:
        together.broadcast_initial()
        together.sum_gradients()
    return (
        parameters,
        {name: parameter.grad for name, parameter in parameters.items()},
        dict(collective.counts),
        {name: together.counts_here(parameter) for name, parameter in parameters.items()},
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shared_parameters(pool: WorkerPool, dtype: torch.dtype) -> None:
    results = pool.run(shared, dtype, world_size=3, process_group=True)
    for name, ranks in HOLDERS.items():
        values = [results[rank][0][name] for rank in ranks]
        gradients = [results[rank][1][name] for rank in ranks]
        assert all(torch.equal(value, torch.full((2, 3), float(ranks[0]), dtype=dtype)) for value in values)
        assert [results[rank][3][name] for rank in ranks] == [rank == ranks[0] for rank in ranks]
        if name == "gate":
            assert gradients == [None]
            continue
        givers = [1] if name == "norm.weight" else ranks
        expected = sum(gradient_of(rank, name, (2, 3), dtype).double() for rank in givers)
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
        accuracy = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(gradients[0].double(), expected, rtol=accuracy, atol=accuracy)
    # ranks 0 and 1 are in two sets of holders: one value and one sum for each
    assert results[0][2] == {"broadcast": 2, "allgather_base": 2}
    assert results[1][2] == {"broadcast": 2, "allgather_base": 2}


def shared_and_sharded() -> tuple[float, bool]:
    """Two stages with two ranks each hold a tied weight, sharded on each stage by itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    stage, coordinate = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    unit = nn.Linear(2, 5, bias=False).double()
    nn.init.constant_(unit.weight, float(stage + 1))
    units = ShardedUnits({"unit": unit}, mesh=mesh["data"])
    holders = [coordinate, 2 + coordinate]
    together = SharedParameters({"weight": unit.weight}, {"weight": holders})
    together.broadcast_initial()
    units.begin_step()
    x = torch.full((1, 2), float(10 ** (2 * stage + coordinate)), dtype=torch.float64)
    if stage == 0:
        unit(x).sum().backward()
    units.end_of_batch(reduce=True)
    had_gradient = unit.weight.grad is not None
    together.sum_gradients()
    assert torch.equal(unit.weight.full_tensor(), torch.ones(5, 2, dtype=torch.float64))
    error = (unit.weight.grad.full_tensor() - (1 + 10) / 2).abs().max().item()
    return error, had_gradient


def test_sharded_parameters_are_shared_shard_by_shard(pool: WorkerPool) -> None:
    results = pool.run(shared_and_sharded, world_size=4, process_group=True)
    assert results == [(0.0, True)] * 2 + [(0.0, False)] * 2


def replicated(dtype: torch.dtype, bucket_bytes: int) -> tuple[list[Any], dict[str, int]]:
    """A gradient on all ranks, on one, on none, and a frozen parameter; the second time from the first result on."""
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 2), (), (4,), (2,), (5,))]
    parameters[4].requires_grad_(False)
    gradients = ReplicatedGradients(parameters, bucket_bytes=bucket_bytes, dtype=torch.float32)
    parameters[0].grad = torch.full((2, 3), float(rank), dtype=dtype).t()
    parameters[1].grad = torch.tensor(rank + 1.0, dtype=dtype)
    if rank == 1:
        parameters[2].grad = torch.full((4,), 6.0, dtype=dtype)
    with CollectiveCounter() as collective:
        gradients.all_reduce()
    parameters[1].grad += rank
    gradients.start()
    gradients.finish()
    return [parameter.grad for parameter in parameters], dict(collective.counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_replicated_gradients(pool: WorkerPool, dtype: torch.dtype) -> None:
    for bucket_bytes, count in ((2**20, 1), (1, 4)):
        for gradients, counts in pool.run(replicated, dtype, bucket_bytes, world_size=2, process_group=True):
            assert torch.equal(gradients[0], torch.full((3, 2), 0.5, dtype=dtype))
            assert torch.equal(gradients[1], torch.tensor(2.0, dtype=dtype))
            assert torch.equal(gradients[2], torch.full((4,), 3.0, dtype=dtype))
            assert gradients[3:] == [None, None]
            assert counts == {"allreduce": count}


class _Values(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), 1.5 * rank).t())
        self.alias = self.weight
        self.low = nn.Parameter(torch.full((2,), float(rank), dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
        self.register_buffer("count", torch.tensor(rank), persistent=False)
        self.register_buffer("wave", torch.full((2,), complex(rank, 1)))
        self.register_buffer("empty", torch.zeros(0))


class Storages(TorchDispatchMode):
    """Keeps count of the bytes that operations have made besides ``known`` tensors, and that are still there."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.made = [StorageWeakRef(tensor.untyped_storage()) for tensor in known]
        self.sizes = [0] * len(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if all(storage._cdata != made.cdata for made in self.made):
                self.made.append(StorageWeakRef(storage))
                self.sizes.append(storage.nbytes())
        return result

    def num_bytes(self) -> int:
        return sum(size for made, size in zip(self.made, self.sizes, strict=True) if not made.expired())


def bytes_while_reduced() -> tuple[int, int]:
    """What there is besides the gradients while those of six layers are averaged, and what the plan counts for it."""
    module = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(6))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    sizes = [
        ParameterSize(name, tuple(parameter.shape), parameter.dtype, True, name, (0,))
        for name, parameter in module.named_parameters()
    ]
    gradients = ReplicatedGradients(module.parameters(), bucket_bytes=128 * 128 * 4)
    with Storages([parameter.grad for parameter in module.parameters() if parameter.grad is not None]) as storages:
        gradients.start()
        found = storages.num_bytes()
    gradients.finish()
    return found, StateSizes(num_copies=2).flat_gradients_of(sizes)


def test_the_plan_counts_the_copies_in_which_gradients_are_averaged(pool: WorkerPool) -> None:
    for found, counted in pool.run(bytes_while_reduced, world_size=2, process_group=True):
        assert counted == 6 * 128 * 128 * 4
        assert counted <= found < 1.01 * counted  # a flag for each parameter


def broadcast() -> bool:
    """The second of two groups of data-parallel ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    module = _Values(rank)
    broadcast_values([*module.parameters(), *module.buffers()], groups[rank // 2])
    expected = _Values(rank - rank % 2)
    assert module.alias is module.weight
    return all(torch.equal(a, b) for a, b in zip(_tensors(module), _tensors(expected), strict=True))


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_broadcast_of_initial_values(pool: WorkerPool) -> None:
    assert pool.run(broadcast, world_size=4, process_group=True) == [True] * 4
