"""A dry run leaves nothing behind that keeps the model alive."""

from __future__ import annotations

import gc
import weakref

import torch
from model_parts import Block, next_token_loss
from one_process import CPU, build, recorded
from torch import Tensor, nn

from lightning_pp.split import discover_units, dry_run
from lightning_pp.split.fakes.parameters import FakeParameters


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(8, 24)

    def training_step(self, batch: Tensor) -> Tensor:
        return next_token_loss(self.head(self.blocks(self.embedding(batch))), batch)


def test_a_recorded_model_is_freed() -> None:
    module = build(Model)
    fake_parameters = FakeParameters(module, CPU)
    record = dry_run(
        recorded(module, torch.randint(0, 24, (3, 6))),
        units=discover_units(module),
        fake_parameters=fake_parameters,
        with_gradients=True,
    )
    assert record.calls[1].memory.saved  # the hooks that note this are held by the graph
    alive = [weakref.ref(module), weakref.ref(fake_parameters), weakref.ref(module.blocks[0].up.weight)]
    del module, fake_parameters, record
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]
