"""Steps that no pipeline can run: an error on every rank with the user's line, the units and what to do, at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from pipelined_fit import Blocks, fit
from pool import WorkerPool
from torch import Tensor, nn

from lightning_pp import PipelineParallelStrategy

LONGEST_S = 15.0
CACHE: dict[str, Tensor] = {}


class Caching(nn.Linear):
    """Keeps what it computes where no module and no argument holds it."""

    def forward(self, x: Tensor) -> Tensor:
        CACHE["keys"] = super().forward(x)
        return CACHE["keys"]


class GlobalCache(Blocks):
    """A cache of keys that the end of the step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Caching(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + CACHE["keys"].mean()  # the line that the message names


class SecondOrder(Blocks):
    """A penalty on the gradient of the inputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = first = batch[0].requires_grad_()
        for block in self.blocks:
            h = block(torch.tanh(h))
        out = self.head(h)
        (gradient,) = torch.autograd.grad(out.sum(), first, create_graph=True)  # the line that the message names
        return out.mean() + gradient.square().mean()


class HooksAGradient(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.blocks[0](batch[0])
        h.register_hook(lambda gradient: gradient * 2)  # the line that the message names
        for block in self.blocks[1:]:
            h = block(h)
        return self.head(h).mean()


class CallsAgain(Blocks):
    """Every pass needs what the last unit gave in the one before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = batch[0]
        for _ in range(2):
            for block in self.blocks:
                h = torch.tanh(block(h)) + self.head(h)  # the line that the message names
        return h.mean()


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class EditsItsInput(Blocks):
    """What the first block does to its input is seen by the end of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Doubling(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = first = torch.tanh(batch[0])
        for block in self.blocks:
            h = block(h)
        return self.head(h + first).mean()  # the line that the message names


def fit_with(module: type[Blocks]) -> None:
    fit(module(), strategy=PipelineParallelStrategy(2, num_microbatches=2))


@pytest.mark.parametrize(
    ("module", "pattern"),
    [
        (
            GlobalCache,
            r"made inside 'blocks\.0' leaves it by another way than its outputs.*HERE.*return it from the unit",
        ),
        (SecondOrder, r"torch\.autograd\.grad.*HERE.*return it from the unit"),
        (HooksAGradient, r"HERE puts a hook on the gradient.*stages 0 \(which runs 'blocks\.\d'\) to 1.*inside a unit"),
        (
            CallsAgain,
            r"must share a stage, because .*is called again after units that its later call depends on, at .*HERE.*"
            r"fewer stages.*units=",
        ),
        (
            EditsItsInput,
            r"made inside 'blocks\.0' leaves it by another way than its outputs.*edit in place.*HERE.*return it",
        ),
    ],
)
def test_every_rank_says_why_and_ends(pool: WorkerPool, module: type[Blocks], pattern: str) -> None:
    report = pool.run(fit_with, module, world_size=2, timeout=60, expect_failure=True)
    with open(__file__) as source:
        lines = source.read().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"class {module.__name__}("))
    named = [n for n, line in enumerate(lines, 1) if n > start and "# the line that the message names" in line]
    pattern = pattern.replace("HERE", rf"test_cannot_be_cut\.py:{named[0]} in \w+") if named else pattern
    for rank, failure in enumerate(report.failures):
        assert failure is not None, f"rank {rank} went on"
        assert re.search(pattern, failure.message), f"rank {rank} says: {failure.type}: {failure.message}"
    assert report.seconds < LONGEST_S
