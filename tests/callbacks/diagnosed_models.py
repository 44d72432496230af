"""Models that are trained for as long as a diagnosis needs, in every process of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from model_parts import VOCAB, WIDTH, Architecture, Block
from pipelined_fit import trainer
from small_models import Descends
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineMonitor, PipelineParallelStrategy
from lightning_pp.telemetry.diagnosis import diagnose
from lightning_pp.telemetry.diagnosis.collection import NUM_STEPS
from lightning_pp.telemetry.diagnosis.finding import Finding

BATCH_SIZE = 8


class Trained(Descends):
    """An architecture with an optimizer."""

    lr = 0.01

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.model = model
        model.log = lambda name, value: None  # type: ignore[method-assign]

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model.training_step(batch)


class _Squared(torch.autograd.Function):
    """A function of a user's own, which computes the weight gradient itself."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return cast(Tensor, (input @ weight).square())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        inner = 2 * (input @ weight) * gradients[0]
        return inner @ weight.t(), input.flatten(0, -2).t() @ inner.flatten(0, -2)


class OfTheirOwn(Architecture):
    """Plain blocks, an einsum, and a function of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block(), EinsumBlock(), OwnBlock(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = self.embedding(batch)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, -2), batch.flatten())


class EinsumBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.randn(WIDTH, 2, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.einsum("btd,dhk->bthk", x, self.mixed).sum(2)


class OwnBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.squared = nn.Parameter(torch.randn(WIDTH, WIDTH + 1) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        squared: Any = _Squared.apply(x, self.squared)
        return super().forward(x) + squared[..., :WIDTH]


def findings_of(name: str) -> list[Finding] | None:
    """Trains a model of transformers, ``task/type`` or the name of a case, or ``their own``; on rank 0 all findings."""
    torch.manual_seed(1)
    make: Callable[[], nn.Module]
    if name == "their own":
        make, batch = OfTheirOwn, lambda count: torch.randint(VOCAB, (count, 12))
    else:
        from transformers_by_config import CASES, generic  # takes seconds

        make, batch = CASES[name] if name in CASES else generic(*name.split("/"))  # type: ignore[arg-type]
    monitor = PipelineMonitor(log_timeline=False)
    strategy = PipelineParallelStrategy(2, num_microbatches=4, schedule="zb_h1", check_first_batches=False)
    run = trainer(strategy=strategy, callbacks=[monitor])
    batches = [batch(BATCH_SIZE) for _ in range(NUM_STEPS + 2)]
    with telling_everything():
        run.fit(Trained(make()), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return None if monitor.report is None else list(monitor.report.findings)


@contextmanager
def telling_everything() -> Iterator[None]:
    """Within, a diagnosis tells whatever it has found, however little it saves and however noisy the machine."""
    before = diagnose.WORTH_TELLING, diagnose.MOST_DIFFERENCE
    diagnose.WORTH_TELLING, diagnose.MOST_DIFFERENCE = -1.0, 100.0
    try:
        yield
    finally:
        diagnose.WORTH_TELLING, diagnose.MOST_DIFFERENCE = before
