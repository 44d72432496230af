"""An update that is undone and made again, and the memory that it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_pp.sharding.gradients.memory_guard import MemoryGuard
from lightning_pp.sharding.gradients.undo_update import UndoableUpdate
from lightning_pp.split.memory.state_memory import ParameterSize, StateSizes

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, tuple[Make, float]] = {
    "adamw": (lambda parameters: AdamW(parameters, lr=0.1), 8.0),
    # its foreach kernel adds the momentum to the gradients themselves
    "nesterov": (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True), 4.0),
    "sgd": (lambda parameters: SGD(parameters, lr=0.1), 0.0),
}


def model_with(make: Make, num_updates: int) -> tuple[nn.Module, Optimizer]:
    """A model after some updates, with gradients for the next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = make(model.parameters())
    for number in range(num_updates + 1):
        optimizer.zero_grad()
        model(torch.full((2, 5), number + 1.0)).square().sum().backward()
        if number < num_updates:
            optimizer.step()
    return model, optimizer


def halve(parameters: Iterable[nn.Parameter]) -> bool:
    """What clipping does."""
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    return True


@pytest.mark.parametrize("is_zeroed", [False, True])
@pytest.mark.parametrize("num_updates", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_made_again_as_if_it_were_the_first(name: str, num_updates: int, is_zeroed: bool) -> None:
    make, _ = OPTIMIZERS[name]
    (model, optimizer), (expected, of_expected) = (model_with(make, num_updates) for _ in range(2))
    update = UndoableUpdate()
    update.begin(optimizer)
    optimizer.step()
    update.end()
    for group in (*optimizer.param_groups, *of_expected.param_groups):
        group["next"] = True
    optimizer.param_groups[0]["lr"] = 0.3  # as a scheduler does after the update
    if is_zeroed:
        optimizer.zero_grad()
    update.make_again(halve)
    halve(expected.parameters())
    of_expected.step()
    assert optimizer.param_groups[0]["lr"] == 0.3 and optimizer.param_groups[0]["next"]
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert (parameter.grad is None) == is_zeroed
        assert is_zeroed or torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]
        states = (optimizer.state[parameter], of_expected.state[other])
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], value) for key, value in states[1].items() if value is not None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_undoing_puts_everything_back(name: str) -> None:
    model, optimizer = model_with(OPTIMIZERS[name][0], 1)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    update = UndoableUpdate()
    update.begin(optimizer)
    optimizer.step()
    update.undo()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    found = optimizer.state_dict()["state"]
    assert found.keys() == states.keys()
    for index, state in states.items():
        assert all(torch.equal(found[index][key], value) for key, value in state.items() if value is not None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_take_the_memory_that_plans_count(name: str) -> None:
    make, num_bytes = OPTIMIZERS[name]
    model, optimizer = model_with(make, 1)
    update = UndoableUpdate()
    update.begin(optimizer)
    held = [each for name in ("_copies", "_gradients") for each in vars(update)[name] if each.dim()]
    parameters = [
        ParameterSize(name, tuple(each.shape), each.dtype, True, "0", (0,)) for name, each in model.named_parameters()
    ]
    sizes = StateSizes(optimizer_bytes=num_bytes)
    counted = StateSizes(optimizer_bytes=num_bytes, keeps_copies=True).of(parameters, [0])
    assert counted.copies_bytes == sum(each.nbytes for each in held)
    assert counted.total_bytes - sizes.of(parameters, [0]).total_bytes == counted.copies_bytes
    before = [each.data_ptr() for each in held]
    update.begin(optimizer)  # the next step's takes no more
    assert [
        each.data_ptr() for name in ("_copies", "_gradients") for each in vars(update)[name] if each.dim()
    ] == before


USES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "a sum": lambda model, alias: model.weight.sum(),  # type: ignore[union-attr, operator]
    "an alias from before": lambda model, alias: alias + 1,
    "data that is set": lambda model, alias: setattr(model.weight, "data", torch.zeros(2, 2)),
    "a list": lambda model, alias: torch.nn.utils.get_total_norm(list(model.parameters())),
    "numpy": lambda model, alias: model.weight.detach().numpy(),  # type: ignore[union-attr, operator]
    "a copy": lambda model, alias: copy.deepcopy(model),
    "a call": lambda model, alias: model(torch.ones(2)),
    "a state dict": lambda model, alias: model.state_dict(),
}
NO_USES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "shapes": lambda model, alias: [(each.shape, each.dtype, each.device) for each in model.parameters()],
    "gradients are dropped": lambda model, alias: model.zero_grad(),
    "other tensors": lambda model, alias: torch.ones(2, 2) @ torch.ones(2, 2),
}


@pytest.mark.parametrize("name", [*USES, *NO_USES])
def test_a_guard_sees_what_uses_the_memory(name: str) -> None:
    model, calls = nn.Linear(2, 2), list[str]()
    model(torch.ones(2)).sum().backward()
    guard, alias = MemoryGuard(), model.weight.data.view(-1)[1:]
    guard.watch(lambda: (model.weight.data, model.bias.data), lambda: calls.append(name))
    try:
        (USES | NO_USES)[name](model, alias)
    finally:
        guard.end()
    assert calls == ([name] if name in USES else [])
    model.weight.sum()
    assert len(calls) == (name in USES)
