"""What runs of units leave behind is told, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_pp.split.side_effects.module_state import WatchedModule


class Meter:
    def __init__(self) -> None:
        self.total = 0.0


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0
        self.seen: list[float] = []
        self.meter = Meter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = Unit()
        self.scale = nn.Parameter(torch.ones(4))


def count(unit: Unit) -> None:
    unit.calls += 1


def add_attribute(unit: Unit) -> None:
    unit.cache = torch.zeros(1)


def write_parameter(unit: Unit) -> None:
    with torch.no_grad():
        unit.linear.weight.mul_(2.0)


def add_to_object(unit: Unit) -> None:
    unit.meter.total += 1.0


CHANGES: dict[str, Callable[[Unit], object]] = {
    "unit.calls": count,
    "unit.cache": add_attribute,
    "unit.seen": lambda unit: unit.seen.append(1.0),
    "unit.meter": add_to_object,
    "unit.linear.weight": write_parameter,
    "unit.norm._buffers": lambda unit: setattr(unit.norm, "running_mean", torch.ones(4)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_by_name(name: str) -> None:
    model = Model()
    watched = WatchedModule(model, {"unit": model.unit})
    watched.begin()
    assert watched.first_change() is None
    CHANGES[name](model.unit)
    assert watched.first_change() == name
    watched.begin()
    assert watched.first_change() is None


def test_buffers_are_put_back() -> None:
    """Of a batch norm's buffers only the count has another version after a forward."""
    model = Model()
    watched = WatchedModule(model, {"unit": model.unit})
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    watched.begin()
    model.unit(torch.randn(3, 4))
    assert not any(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert watched.first_change() is None
    watched.put_back()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_forward_that_leaves_nothing_behind() -> None:
    model = Model().eval()
    watched = WatchedModule(model, {"unit": model.unit})
    watched.begin()
    model.unit.forward = model.unit.forward  # as who intercepts calls does
    (model.unit(torch.randn(3, 4)) * model.scale).sum().backward()
    assert watched.first_change() is None
