"""Optimizers that need whole matrices, over sharded parameters against the same over whole ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch  # noqa: F401  # numbers ranks for its warnings
import pytest
import torch
from pool import WorkerPool
from sharded_parameters import SmallModel, give_gradients, groups, sharded_model, whole
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from whole_optimizers import Derived, GlobalScale, Lookahead, Normalized, Preconditioned, Quantized, ScheduleFree

from lightning_pp import CombinedOptimizer
from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding.shard_updates import end_update, update_shards
from lightning_pp.sharding.stage_updates import update_as_stage


def matrices(model: SmallModel) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def combined(model: SmallModel) -> Optimizer:
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return CombinedOptimizer(Preconditioned(matrices(model)), torch.optim.AdamW(rest, lr=0.01, foreach=True))


def trained_schedule_free(model: SmallModel) -> Optimizer:
    optimizer = ScheduleFree(groups(model))
    optimizer.train()
    return optimizer


WAYS: dict[str, Callable[[SmallModel], Optimizer]] = {
    "Adafactor": lambda model: torch.optim.Adafactor(groups(model), lr=0.05),
    "Adafactor foreach": lambda model: torch.optim.Adafactor(groups(model), lr=0.05, foreach=True),
    "Muon": lambda model: torch.optim.Muon(matrices(model), lr=0.05),
    "Normalized": lambda model: Normalized(groups(model)),
    "Preconditioned": lambda model: Preconditioned(groups(model)),
    "Quantized": lambda model: Quantized(groups(model)),
    "Derived": lambda model: Derived(groups(model), lr=0.05, momentum=0.9, foreach=True),
    "Lookahead": lambda model: Lookahead(torch.optim.SGD(groups(model), lr=0.05, momentum=0.9)),
    "ScheduleFree": trained_schedule_free,
    "combined": combined,
}


def step(optimizer: Optimizer, model: SmallModel, seed: int) -> None:
    if isinstance(optimizer, Lookahead):
        give_gradients(model, seed)
        optimizer.step()
    else:
        assert optimizer.step(lambda: (give_gradients(model, seed), seed)[1]) == seed


def distance(model: SmallModel, expected: SmallModel) -> float:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max((whole(one.detach()) - other.detach()).abs().max().item() for one, other in pairs)


def states_differ(saved: dict[str, Any], expected: dict[str, Any]) -> float:
    """Of state dicts: every rank has every state, in shards or whole, and the settings of every group."""
    settings = [
        [{k: v for k, v in g.items() if k != "params"} for g in each["param_groups"]] for each in (saved, expected)
    ]
    assert settings[0] == settings[1]
    assert saved["state"].keys() == expected["state"].keys()
    worst = 0.0
    for number, wanted in expected["state"].items():
        assert saved["state"][number].keys() == wanted.keys()
        for key, value in wanted.items():
            found = saved["state"][number][key]
            if isinstance(value, Tensor):
                worst = max(worst, (whole(found).double() - value.double()).abs().max().item())
            else:
                assert found == value
    return worst


def differences(shape: tuple[int, ...]) -> dict[str, float]:
    """In a worker: three updates, state dicts, then three more by optimizers that load those."""
    found = {}
    for name, make in WAYS.items():
        model, expected = sharded_model(shape), SmallModel()
        optimizer, reference = make(model), make(expected)
        update_shards(optimizer)
        update_as_stage([optimizer], has_stages=False)
        for seed in range(3):
            step(optimizer, model, seed)
            step(reference, expected, seed)
        saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(reference.state_dict())
        error = max(distance(model, expected), states_differ(*saved))
        step(optimizer, model, 3)  # goes on with what was spread
        step(reference, expected, 3)
        error = max(error, distance(model, expected))
        optimizer, reference = make(model), make(expected)
        optimizer.load_state_dict(saved[0])
        reference.load_state_dict(saved[1])
        update_shards(optimizer)
        for seed in range(3, 6):
            step(optimizer, model, seed)
            step(reference, expected, seed)
        found[name] = max(error, distance(model, expected))
    return found


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("world_size", "shape"), [(2, (2,)), (4, (2, 2))], ids=["shard", "hsdp"])
def test_updates_are_those_of_whole_parameters(pool: WorkerPool, world_size: int, shape: tuple[int, ...]) -> None:
    for found in pool.run(differences, shape, world_size=world_size, process_group=True, timeout=120):
        assert found.keys() == WAYS.keys()
        assert max(found.values()) == 0, found


def schedule_free() -> list[float]:
    """In a worker: evaluates between updates, with a state of each rank's own shards."""
    found = []
    model, expected = sharded_model((2,)), SmallModel()
    optimizer, reference = ScheduleFree(groups(model)), ScheduleFree(groups(expected))
    update_shards(optimizer)
    update_as_stage([optimizer], has_stages=True)
    optimizer.train()
    reference.train()
    for seed in range(4):
        step(optimizer, model, seed)
        step(reference, expected, seed)
        optimizer.eval()
        reference.eval()
        found.append(distance(model, expected))
        optimizer.train()
        reference.train()
    assert all(isinstance(optimizer.state[p]["iterate"], DTensor) for p in model.wide.parameters())
    return [*found, distance(model, expected)]


def test_weights_swapped_between_updates(pool: WorkerPool) -> None:
    for found in pool.run(schedule_free, world_size=2, process_group=True):
        assert max(found) < 1e-14, found


def shared_out() -> tuple[int, int]:
    """In a worker: elements of states that this rank keeps, and the parameters that an update sees."""
    model = sharded_model((2,))
    optimizer = Normalized(groups(model))
    update_shards(optimizer)
    seen: list[Any] = []
    optimizer.update = lambda p, *_, own=optimizer.update: (seen.append(p), own(p, *_))  # type: ignore[method-assign]
    give_gradients(model, 0)
    optimizer.step()
    assert not any(isinstance(parameter, DTensor) for parameter in seen)
    num_seen = len(seen)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    optimizer.param_groups[0]["lr"] = "no number"
    with pytest.raises(TypeError):
        optimizer.step()
    end_update(optimizer)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    sharded = [optimizer.state[p] for p in model.parameters() if p in optimizer.state and isinstance(p, DTensor)]
    return sum(state["average"].numel() for state in sharded), num_seen


def test_each_rank_updates_and_keeps_its_own_matrices(pool: WorkerPool) -> None:
    # wide has 35 and 7 elements, narrow 3 and 1; both ranks update whole.weight and whole.bias
    (first, num_first), (second, num_second) = pool.run(shared_out, world_size=2, process_group=True)
    assert (first, second) == (35, 11)
    assert (num_first, num_second) == (1 + 2, 3 + 2)


class _OwnSGD(torch.optim.SGD):
    is_elementwise = True


def said_to_be_elementwise() -> float:
    """In a worker: what a class says of itself saves the messages."""
    model, expected = sharded_model((2,)), SmallModel()
    optimizer, reference = (
        _OwnSGD(groups(model), lr=0.1, momentum=0.9),
        torch.optim.SGD(groups(expected), lr=0.1, momentum=0.9),
    )
    update_shards(optimizer)
    for seed in range(3):
        step(optimizer, model, seed)
        step(reference, expected, seed)
    assert isinstance(optimizer.state[model.wide.weight]["momentum_buffer"], DTensor)
    return distance(model, expected)


def test_a_class_says_that_it_is_elementwise(pool: WorkerPool) -> None:
    assert pool.run(said_to_be_elementwise, world_size=2, process_group=True) == [0.0, 0.0]


@pytest.mark.parametrize("is_combined", [False, True])
def test_one_scale_over_all_parameters_is_refused(is_combined: bool) -> None:
    model = SmallModel()
    before = copy.deepcopy(model.state_dict())
    optimizer: Optimizer = GlobalScale(groups(model))
    if is_combined:
        optimizer = CombinedOptimizer(optimizer)
    with pytest.raises(ConfigurationError, match="GlobalScale combines parameters in an update: a parameter"):
        update_as_stage([optimizer], has_stages=True)
    update_as_stage([optimizer], has_stages=False)  # whole parameters, all of them
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not optimizer.state


@pytest.mark.parametrize("name", list(WAYS))
def test_others_are_not_refused(name: str) -> None:
    model = SmallModel()
    update_as_stage([WAYS[name](model)], has_stages=True)
    for parameter, other in zip(model.parameters(), SmallModel().parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=0, atol=0)


class _NeedsMore(Normalized):
    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.curvature)  # type: ignore[attr-defined]


def test_what_cannot_be_tried_is_told() -> None:
    with pytest.warns(UserWarning, match=r"_NeedsMore failed on copies of a few parameters \(AttributeError"):
        update_as_stage([_NeedsMore(groups(SmallModel()))], has_stages=True)
