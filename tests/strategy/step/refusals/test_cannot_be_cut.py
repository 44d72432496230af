"""Steps that no pipeline can run: an error on every rank with the user's line, the units and what to do, at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from pipelined_fit import fit, loader
from pool import WorkerPool
from small_models import Blocks
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


class Branches(Blocks):
    """Goes one way or the other by what the first block gave."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = torch.tanh(self.blocks[0](batch[0]))
        for block in self.blocks[1:]:
            if h.sum() > 0:  # the line that the message names
                h = -h
            h = block(h)
        return self.head(h).mean()


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


class CallsBetween(Blocks):
    """Two units share a stage, since what the first keeps is used by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Caching(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.blocks[1](self.blocks[0](batch[0]))
        h = self.blocks[2](h) + CACHE["keys"]  # the line that the message names
        h = self.blocks[3](h)
        return self.head(h).mean()


class BranchesOnAGlobal(Blocks):
    """What no stage can look up before a step decides which units it calls."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        CACHE.clear()
        if batch_idx:
            CACHE["is short"] = torch.ones(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = batch[0]
        for block in list(self.blocks)[: -1 if "is short" in CACHE else None]:
            h = block(torch.tanh(h))
        return self.head(h).mean()  # the line that the message names


class SamplesToValidate(Blocks):
    """Calls the model again on what it gave."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., None].expand(x.shape)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(self(batch[0])).mean())

    def val_dataloader(self) -> Any:
        return loader()


class UsesAWeightOnlyToValidate(Blocks):
    """What the training step was cut for does not tell that the last stage needs this weight."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        gain = self.blocks[0].weight.mean()  # the line that the message names
        self.log("val_loss", self(batch[0]).mean() * gain)

    def val_dataloader(self) -> Any:
        return loader()


def fit_with(module: type[Blocks], **options: Any) -> None:
    fit(module(), strategy=PipelineParallelStrategy(2, num_microbatches=2, **options))


CANNOT_BE_CUT: list[tuple[type[Blocks], str]] = [
    (GlobalCache, r"made inside 'blocks\.0' is used by .*HERE, but is not an output.*return it from the unit"),
    (Branches, r"HERE reads a value that depends on weights \(blocks\.0\).*'blocks\.1' is called after.*into a unit"),
    (SecondOrder, r"HERE, but is not an output.*torch\.autograd\.grad.*return it from the unit"),
    (HooksAGradient, r"HERE puts a hook on the gradient.*before the end of the last unit.*inside a unit"),
    (
        CallsAgain,
        r"must share a stage, because .*is called again at .*HERE, after units that this call depends on.*"
        r"fewer stages.*units=",
    ),
    (EditsItsInput, r"made inside 'blocks\.0' is used by .*HERE, but is not an output.*edit in place.*return it"),
    (
        BranchesOnAGlobal,
        r"HERE called unit .head., but the recorded step called .blocks\.3. there.*dynamic_step=True|"
        r"rank \d .*has failed in the set-up|did not receive what",
    ),
    (
        SamplesToValidate,
        r"the unit 'blocks\.0' at .*small_models\.py.* runs on stage 0 and needs an output of 'head'.*later stage 1.*"
        r"sampling, decoding\) on one device",
    ),
    (
        UsesAWeightOnlyToValidate,
        r"HERE uses the parameter 'blocks\.0\.weight' outside of a call of its unit, on stage 1, and stage 0 alone has "
        r"it.*Call the unit",
    ),
]


def with_line(pattern: str, module: type[Blocks]) -> str:
    """``pattern`` with the line in ``module`` that is marked in this file in the place of HERE."""
    with open(__file__) as source:
        lines = source.read().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"class {module.__name__}("))
    named = [n for n, line in enumerate(lines, 1) if n > start and "# the line that the message names" in line]
    return pattern.replace("HERE", rf"test_cannot_be_cut\.py:{named[0]} in \w+") if named else pattern


def check_everywhere(pool: WorkerPool, pattern: str, module: type[Blocks], **options: Any) -> None:
    report = pool.run(fit_with, module, world_size=2, timeout=60, expect_failure=True, **options)
    pattern = with_line(pattern, module)
    for rank, failure in enumerate(report.failures):
        assert failure is not None, f"rank {rank} went on"
        assert re.search(pattern, failure.message), f"rank {rank} says: {failure.type}: {failure.message}"
    assert report.seconds < LONGEST_S


@pytest.mark.by_day(3)
@pytest.mark.parametrize(("module", "pattern"), CANNOT_BE_CUT)
def test_every_rank_says_why_and_ends(pool: WorkerPool, module: type[Blocks], pattern: str) -> None:
    check_everywhere(pool, pattern, module)


@pytest.mark.parametrize(
    ("module", "split_point", "pattern"),
    [
        (
            CallsAgain,
            "blocks.2",
            r"split_points cannot cut before 'blocks\.2': .* must share a stage.*HERE.*another unit",
        ),
        (
            CallsBetween,
            "blocks.2",
            r"split_points cannot cut before 'blocks\.2'.*blocks\.1.*used by 'blocks\.\d' at .*HERE",
        ),
    ],
)
def test_split_points_where_no_cut_is_possible(
    pool: WorkerPool, module: type[Blocks], split_point: str, pattern: str
) -> None:
    check_everywhere(pool, pattern, module, split_points=[split_point])
