"""Edits in place between and inside units: what one device trains without trouble is trained the same, or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from extra_steps import Losses
from feature_parts import Data, check_with_weights, make, make_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor, nn

LAYOUTS = [Layout("zb_h1", 3, 1, 3), pytest.param(Layout("zb_v", 2, 1, 2), marks=pytest.mark.nightly)]


class Edits(Classifier):
    """Six blocks whose backward does not read their outputs, so that autograd allows edits of these."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(
            nn.Linear(6, 10), *(nn.Sequential(nn.Tanh(), nn.Linear(10, 10)) for _ in range(4)), nn.Linear(10, 3)
        )
        self.position = nn.Parameter(torch.randn(10))

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)[1:-1]


class AddsAndScales(Edits):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        h += self.position
        for block in self.blocks():
            h = block(h)
            h += self.position
            h.mul_(0.5)
        return self.layers[-1](h)


class WritesIntoSlices(Edits):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        for number, block in enumerate(self.blocks()):
            h = block(h)
            h[:, number] = 0
            h[:, -1] += h[:, 1]
            h[x[:, 0] > 0, 2] = 1.0
        return self.layers[-1](h)


class EditsViews(Edits):
    """Halves of an output are edited as views of it, after the whole was looked at."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        for block in self.blocks():
            h = block(h)
            total = h.sum(-1, keepdim=True)
            first, second = h[:, :5], h[:, 5:]
            first.add_(total.detach())
            second.neg_()
        return self.layers[-1](h)


class AddsIntoTheResidual(Edits):
    """One tensor is the stream: every block's output is added into it."""

    def forward(self, x: Tensor) -> Tensor:
        stream = self.layers[0](x).clone()
        for block in self.blocks():
            stream += block(stream.clone())
        return self.layers[-1](stream)


class TurnsInPlace(Edits):
    """What a block returns is turned and back, in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        for number, block in enumerate(self.blocks()):
            h = block(h).t_()
            h[number] += 1.0
            h = h.unsqueeze_(0).squeeze(0).t()
        return self.layers[-1](h)


class FillsABuffer(Edits):
    """Outputs of all blocks are written into one tensor that the head reads."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        collected = torch.zeros(len(x), 5, 10, dtype=x.dtype)
        collected[:, 0] = h
        for number, block in enumerate(self.blocks(), 1):
            h = block(h)
            collected[:, number] = h
        return self.layers[-1](collected.sum(1))


class KeepsAnAlias(Edits):
    """An output is edited after another name was given to it, and both names are used later."""

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.layers[0](x)
        h.add_(self.position)
        for block in self.blocks():
            h = block(h)
        return self.layers[-1](h + first)


class EditsMasks(Edits):
    """A mask of integers is narrowed in place from block to block, by what the batch says."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        mask = torch.ones(len(x), 10, dtype=torch.bool)
        for number, block in enumerate(self.blocks()):
            mask[:, number] = x[:, number] > 0
            h = block(h).masked_fill_(~mask, 0.1)
        return self.layers[-1](h)


class InplaceBlock(nn.Module):
    """Begins with an activation in place, on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu_(x))


class UnitsEditTheirInputs(Edits):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(6, 10), *(InplaceBlock() for _ in range(4)), nn.Linear(10, 3))


class SkipsEditedInputs(UnitsEditTheirInputs):
    """A residual around a block that edits what it is given: the sum takes the edited input."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        for block in self.blocks():
            h = h + block(h)  # the line that the message names
        return self.layers[-1](h)


class EditsTheLogits(Edits):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        logits[:, 0] -= 1
        logits.div_(2.0)
        return F.cross_entropy(logits, batch[1])


class SwapsData(Edits):
    """Writes past autograd, through ``.data`` and under ``no_grad``."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        for block in self.blocks():
            h = block(h)
            h.data.clamp_(-1, 1)
            with torch.no_grad():
                h[:, 0].zero_()
        return self.layers[-1](h)


class OutArguments(Edits):
    """Writes what it normalises by into a tensor of its own, with ``out=``."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        size = torch.empty(len(x), dtype=x.dtype)
        for block in self.blocks():
            h = block(h)
            torch.amax(h.detach(), 1, out=size)
            h = h / (1 + size.abs()).unsqueeze(1)
        return self.layers[-1](h)


EDITS = {
    kind.__name__: kind
    for kind in (
        AddsAndScales,
        WritesIntoSlices,
        EditsViews,
        AddsIntoTheResidual,
        TurnsInPlace,
        FillsABuffer,
        KeepsAnAlias,
        EditsMasks,
        UnitsEditTheirInputs,
        EditsTheLogits,
        SwapsData,
        OutArguments,
    )
}


def train(layout: Layout | None, kind: type[Edits]) -> tuple[list[float], float, dict[str, Tensor]]:
    losses, module = Losses(), make(kind)
    trainer = make_trainer(layout, callbacks=[losses])
    trainer.fit(module, Data())
    return losses.found, float(trainer.callback_metrics["val_loss"]), whole_weights(module)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("edits", EDITS)
def test_trained_as_on_one_device(pool: WorkerPool, edits: str, layout: Layout) -> None:
    check_with_weights(pool, train, layout, EDITS[edits])


def test_a_value_that_its_unit_edits_and_others_use_is_refused_with_the_line(pool: WorkerPool) -> None:
    """One device allows it, since nothing that backward needs is lost; the edit is on the unit's stage only."""
    train(None, SkipsEditedInputs)
    report = pool.run(train, Layout("zb_h1", 3, 1, 3), SkipsEditedInputs, world_size=3, timeout=60, expect_failure=True)
    with open(__file__) as source:
        line = next(number for number, text in enumerate(source, 1) if "# the line that the message names" in text)
    for failure in report.failures:
        assert failure is not None and failure.type == "SplitError"
        assert "layers.1, layers.2, layers.3, layers.4, layers.5 must share a stage" in failure.message
        assert re.search(
            rf"test_edits_in_place\.py:{line} in forward, but is not an output.*edit in place.*; return it",
            failure.message,
        )
    assert report.seconds < 15
