"""Every elementwise optimizer of torch over sharded and whole parameters against the same optimizer over whole ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pool import WorkerPool
from sharded_parameters import SmallModel, give_gradients, groups, sharded_model, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightning_pp.sharding.shard_updates import end_update, update_shards

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


def make(name: str, model: SmallModel, flags: dict[str, Any]) -> Optimizer:
    options = {**ELEMENTWISE[name], **flags, "lr": 0.02}
    optimizer: Optimizer = getattr(torch.optim, name)(groups(model), **options)
    return optimizer


def largest_difference(model: SmallModel, expected: SmallModel, optimizer: Optimizer, reference: Optimizer) -> float:
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
        model, expected = sharded_model(shape), SmallModel()
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
    for model in (sharded_model((2,)), SmallModel()):
        early = [*model.wide.parameters(), *model.whole.parameters()]
        optimizer = torch.optim.AdamW(early, lr=0.02, amsgrad=True, foreach=True)
        update_shards(optimizer)

        def step(seed: int, model: SmallModel = model, optimizer: Optimizer = optimizer) -> None:
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
    return found + [name for name, reference in memory.items() if not reference.expired()]


def test_no_memory_is_held_for_the_next_update(pool: WorkerPool) -> None:
    assert pool.run(kept_alive, world_size=2, process_group=True) == [[], []]
