"""Every optimizer of torch over sharded and whole parameters against the same optimizer over whole ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pool import WorkerPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding import ShardedUnits, end_update, forget_shards, update_shards

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "ASGD": {"lambd": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adadelta": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {"momentum_decay": 0.01},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
}
FUSED = ("SGD", "Adagrad", "Adam", "AdamW")
WAYS = [
    *((name, flag) for name in ELEMENTWISE for flag in ({}, {"foreach": True}, {"foreach": False})),
    *((name, {"fused": True}) for name in FUSED),
]


class _Model(nn.Module):
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


def give_gradients(model: _Model, seed: int) -> None:
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


def sharded_model(shape: tuple[int, ...]) -> _Model:
    model = _Model()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    ShardedUnits({name: getattr(model, name) for name in ("wide", "narrow", "unused")}, mesh=mesh)
    return model


def groups(model: _Model) -> list[dict[str, Any]]:
    """Sharded and whole parameters in one group, and a group of its own for a rate of its own."""
    slow = [model.narrow.weight]
    rest = [parameter for parameter in model.parameters() if parameter is not slow[0]]
    return [{"params": rest}, {"params": slow, "lr": 0.003}]


def make(name: str, model: _Model, flags: dict[str, Any]) -> Optimizer:
    options = {**ELEMENTWISE[name], **flags, "lr": 0.02}
    optimizer: Optimizer = getattr(torch.optim, name)(groups(model), **options)
    return optimizer


def largest_difference(model: _Model, expected: _Model, optimizer: Optimizer, reference: Optimizer) -> float:
    """Over weights and states, all of which have to be sharded as their parameters are."""
    worst = 0.0
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        worst = max(worst, (whole(parameter.detach()) - other.detach()).abs().max().item())
        state, wanted = optimizer.state.get(parameter, {}), reference.state.get(other, {})
        assert list(state) == list(wanted)
        for key, value in wanted.items():
            if isinstance(value, Tensor):
                assert isinstance(state[key], DTensor) == (isinstance(parameter, DTensor) and value.dim() > 0)
                worst = max(worst, (whole(state[key]) - value).abs().max().item())
            else:
                assert state[key] == value
    return worst


def differences(shape: tuple[int, ...]) -> dict[str, float]:
    """In a worker: three steps with a closure, then three without one in optimizers that load that state."""
    found = {}
    for name, flags in WAYS:
        model, expected = sharded_model(shape), _Model()
        optimizer, reference = make(name, model, flags), make(name, expected, flags)
        update_shards(optimizer)
        update_shards(optimizer)  # as in a second run of the same optimizer
        for seed in range(3):
            losses = []
            for one, its_model in ((optimizer, model), (reference, expected)):
                losses.append(one.step(lambda m=its_model, s=seed: (give_gradients(m, s), s)[1]))
            assert losses == [seed, seed]
        error = largest_difference(model, expected, optimizer, reference)
        saved = optimizer.state_dict(), reference.state_dict()
        optimizer, reference = make(name, model, flags), make(name, expected, flags)
        optimizer.load_state_dict(saved[0])
        reference.load_state_dict(saved[1])
        update_shards(optimizer)
        for seed in range(3, 6):
            for one, its_model in ((optimizer, model), (reference, expected)):
                give_gradients(its_model, seed)
                one.step()
        found[f"{name} {flags}"] = max(error, largest_difference(model, expected, optimizer, reference))
    return found


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("world_size", "shape"), [(2, (2,)), (4, (2, 2))], ids=["shard", "hsdp"])
def test_updates_are_those_of_whole_parameters(pool: WorkerPool, world_size: int, shape: tuple[int, ...]) -> None:
    for found in pool.run(differences, shape, world_size=world_size, process_group=True, timeout=120):
        assert len(found) == 3 * len(ELEMENTWISE) + len(FUSED)
        assert max(found.values()) == 0, found


def seen_by_others() -> None:
    """In a worker: user code around an update, and the optimizer after one that has failed, have DTensors."""
    model = sharded_model((2,))
    optimizer = torch.optim.AdamW(groups(model), foreach=True)
    seen = []

    def look(optimizer: Optimizer, *_: Any) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        values = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
        seen.append((sum(isinstance(p, DTensor) for p in held), sum(isinstance(value, DTensor) for value in values)))
        assert {id(parameter) for parameter in held} == {id(parameter) for parameter in model.parameters()}

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    update_shards(optimizer)
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    lists = [group["params"] for group in optimizer.param_groups]
    give_gradients(model, 0)
    with CommDebugMode() as collectives:
        optimizer.step(lambda: look(optimizer))
    assert collectives.get_total_counts() == 0
    # six sharded parameters; two states for each of the four that have a gradient
    assert seen == [(6, 0)] * 3 + [(6, 8)] * 2
    assert all(group["params"] is kept for group, kept in zip(optimizer.param_groups, lists, strict=True))
    optimizer.param_groups[1]["betas"] = "no numbers"
    with pytest.raises(ValueError, match="unpack"):
        optimizer.step()
    end_update(optimizer)
    look(optimizer)
    assert seen[-1] == (6, 8)


def test_only_the_update_sees_shards(pool: WorkerPool) -> None:
    pool.run(seen_by_others, world_size=2, process_group=True)


def replace_memory(parameter: nn.Parameter) -> None:
    """Another storage, and other numbers, for the same parameter."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = parameter.to_local().detach() * 1.5
    else:
        parameter.data = parameter.data * 1.5


def changed_between_updates() -> float:
    """In a worker: what others do to an optimizer between updates holds for the next one, as without shards."""
    runs = []
    for model in (sharded_model((2,)), _Model()):
        early = [*model.wide.parameters(), *model.whole.parameters()]
        optimizer = torch.optim.AdamW(early, lr=0.02, amsgrad=True, foreach=True)
        update_shards(optimizer)

        def step(seed: int, model: _Model = model, optimizer: Optimizer = optimizer) -> None:
            give_gradients(model, seed)
            optimizer.step()

        step(0)
        saved = copy.deepcopy(optimizer.state_dict())
        step(1)
        optimizer.add_param_group({"params": list(model.narrow.parameters()), "lr": 0.01})
        step(2)
        give_gradients(model, 3)
        model.wide.bias.grad = None  # where others of the same group have one
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # nobody has
        optimizer.state[model.wide.weight]["exp_avg"].mul_(0.5)
        step(4)
        kept = optimizer.state[model.wide.weight]
        kept["exp_avg_sq"] = kept["exp_avg_sq"] * 2
        step(5)
        optimizer.state[model.narrow.weight] = {}  # begins again
        step(6)
        optimizer.param_groups[1]["params"].reverse()
        step(7)
        replace_memory(model.wide.weight)
        step(8)
        del optimizer.param_groups[1]
        step(9)
        optimizer.load_state_dict(saved)
        step(10)
        runs.append((model, optimizer))
    (model, optimizer), (expected, reference) = runs
    return largest_difference(model, expected, optimizer, reference)


def test_changes_between_updates_hold(pool: WorkerPool) -> None:
    assert pool.run(changed_between_updates, world_size=2, process_group=True) == [0.0, 0.0]


def kept_alive() -> list[str]:
    """In a worker: what is still there of gradients after an update, and of states that have been left."""
    model = sharded_model((2,))
    optimizer = torch.optim.AdamW(groups(model), foreach=True)
    update_shards(optimizer)
    give_gradients(model, 0)
    memory = {"gradient": StorageWeakRef(model.wide.weight.grad.to_local().untyped_storage())}
    optimizer.step()
    optimizer.zero_grad()
    found = [name for name, reference in memory.items() if not reference.expired()]
    optimizer.step()
    average = optimizer.state[model.wide.weight]["exp_avg"]
    memory = {"state": StorageWeakRef(average.to_local().untyped_storage())}
    del average
    optimizer.state.clear()  # as moving it to another device
    forget_shards(optimizer)
    return found + [name for name, reference in memory.items() if not reference.expired()]


def test_no_memory_is_held_by_what_is_kept_for_the_next_update(pool: WorkerPool) -> None:
    assert pool.run(kept_alive, world_size=2, process_group=True) == [[], []]


class _DerivedSGD(torch.optim.SGD):
    pass


def needs_whole() -> str:
    """In a worker: optimizers that may need whole tensors see DTensors, and say so where torch cannot mix them."""
    model = sharded_model((2,))
    update_shards(_DerivedSGD(groups(model), lr=0.1))
    with pytest.raises(ConfigurationError) as error:
        update_shards(_DerivedSGD(groups(model), lr=0.1, foreach=True))
    return str(error.value)


def test_others_than_elementwise_ones(pool: WorkerPool) -> None:
    for message in pool.run(needs_whole, world_size=2, process_group=True):
        assert message == (
            "_DerivedSGD(foreach=True) updates all parameters in one call. On this rank 5 parameters are sharded and 2 "
            "are whole, and torch cannot mix them in one call. Leave out foreach=True."
        )
