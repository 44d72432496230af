"""A dry run leaves nothing behind that keeps the model alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from model_parts import Block, next_token_loss
from one_process import CPU, build, recorded
from torch import Tensor, nn

from lightning_pp.split.dry_run.run import dry_run
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.split.unit_calls.units import discover_units


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(8, 24)

    def training_step(self, batch: Tensor) -> Tensor:
        return next_token_loss(self.head(self.blocks(self.embedding(batch))), batch)


class Kept:
    """What blocks are given, and keep something in, as caches of transformers."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []


class Keeping(Model):
    def training_step(self, batch: Tensor) -> Tensor:
        h, kept = self.embedding(batch), Kept()
        for block in self.keeping:
            h = block(h, kept)
        return next_token_loss(self.head(h), batch)

    def __init__(self) -> None:
        super().__init__()
        self.keeping = nn.ModuleList(KeepingBlock() for _ in range(2))


class KeepingBlock(Block):
    def forward(self, x: Tensor, kept: Kept | None = None) -> Tensor:
        x = super().forward(x)
        if kept is not None:
            kept.values.append(x)
        return x


@pytest.mark.parametrize("kind", [Model, Keeping])
def test_a_recorded_model_is_freed(kind: type[Model]) -> None:
    module = build(kind)
    fake_parameters = FakeParameters(module, CPU)
    record = dry_run(
        recorded(module, torch.randint(0, 24, (3, 6))),
        units=discover_units(module),
        fake_parameters=fake_parameters,
        with_gradients=True,
    )
    assert record.calls[1].memory.saved  # the hooks that note this are held by the graph
    alive = [weakref.ref(each) for each in (module, fake_parameters, module.blocks[0].up.weight, record)]
    del module, fake_parameters, record
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4
