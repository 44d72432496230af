"""A module whose step changes what it reaches besides the module, by every way there is."""

from __future__ import annotations

import random
import types
from collections import Counter, deque
from functools import cache, partial, wraps
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

number = 0
events: list[int] = []
nested: dict[str, Any] = {"a": [{"b": (deque([1], maxlen=4),)}]}
tally: Counter[str] = Counter()
sums, larger = torch.zeros(3), torch.zeros(100_000)
counts = np.zeros(3)
draws, numpy_draws, torch_draws = random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)
history = [0] * 70_000
space = types.SimpleNamespace(seen=[])
elsewhere = types.ModuleType("elsewhere_of_a_user")
elsewhere.rate = 1.0  # type: ignore[attr-defined]
teacher = nn.BatchNorm1d(2)


class Meter:
    total: ClassVar[int] = 0
    names: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        self.values: list[int] = []
        self.last: int | None = None

    def __call__(self, value: int) -> None:
        self.last = value
        self.values.append(value)
        Meter.total += value
        self.names.add(str(value))
        noted(value)


meter = Meter()


def noted(value: int, seen: list[int] = []) -> None:  # noqa: B006
    seen.append(value)
    noted.last = value  # type: ignore[attr-defined]


def counted(step: Any) -> Any:
    calls = 0
    held: list[int] = []

    @wraps(step)
    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        held.append(calls)
        return step(*args)

    return call


@cache
def of_library(key: int) -> list[int]:
    events.append(key)
    return events


class Changes(nn.Module):
    num_made: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.transforms = [partial(counted(torch.sin))]

    @counted
    def training_step(self, batch: Tensor) -> Tensor:
        global number, made
        number += 1
        made = number
        for transform in self.transforms:
            batch = transform(batch)
        self.by_names()
        meter(number)
        return self.layer(teacher(batch))  # type: ignore[no-any-return]

    def by_names(self) -> None:
        from outside_parts import events as imported

        imported.append(number)
        nested["a"][0]["b"][0].append(number)
        tally["steps"] += 1
        sums.add_(1)
        sums.data[0] += 1
        counts[0] += 1
        draws.random(), numpy_draws.random(), torch.rand(1, generator=torch_draws)
        history.append(number)
        space.seen.append(number)
        elsewhere.rate *= 0.5
        type(self).num_made += 1
        Changes.num_later = 1  # type: ignore[attr-defined]

    def train_dataloader(self) -> None:
        larger.add_(1)  # nothing that a step comes to


def everything() -> dict[str, Any]:
    """All that a step of the module changes, as values."""
    cells = [*counted_cells(Changes.training_step), *counted_cells(module.transforms[0].func)]
    return {
        "number": number, "made": globals().get("made"), "events": list(events), "nested": repr(nested),
        "tally": dict(tally), "sums": sums.tolist(), "counts": counts.tolist(), "draws": draws.getstate(),
        "numpy_draws": repr(numpy_draws.bit_generator.state), "torch_draws": torch_draws.get_state().tolist(),
        "history": len(history), "space": list(space.seen), "elsewhere": elsewhere.rate,
        "teacher": [buffer.tolist() for buffer in teacher.buffers()],
        "meter": (meter.last, list(meter.values), Meter.total, set(Meter.names)),
        "noted": (dict(vars(noted)), list(noted.__defaults__[0])),  # type: ignore[index]
        "cells": cells, "class": (Changes.num_made, hasattr(Changes, "num_later")),
    }  # fmt: skip


def counted_cells(function: Any) -> list[Any]:
    contents = [cell.cell_contents for cell in function.__closure__]
    return [list(content) if isinstance(content, list) else content for content in contents]


module = Changes()
