"""What it costs to follow how values grow with the batch, and to check the first batches, beside a step without.

Two processes run a small GPT as a pipeline of two stages and eight microbatches through ``Trainer``: with a cross
entropy of torch, with a masked mean by hand, and with a mean of a loop over samples. Each training is run with
corrections and check, without the check, and without both (corrections taken out for this benchmark: the loss is then
not that of one device). With --rehearsals also with other ways to count: a rehearsal for each microbatch, and one for
each batch (of a microbatch, which is less than one of the batch; its counts stand for all). Times are CPU times of the
main thread of the last stage; runs take turns, medians of all steps after the first four.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/costs/losses.py
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.strategy.batch.counting import StepCounting
from lightning_pp.strategy.batch.scaling import BatchScaling, ScaledBatch

WORDS, LENGTH, BATCH, MICROBATCHES = 256, 64, 32, 8


class SmallGPT(L.LightningModule):
    """Blocks of torch, under one of three losses."""

    def __init__(self, loss: str, width: int, num_blocks: int) -> None:
        super().__init__()
        self.loss = loss
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, WORDS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One of the losses."""
        x, target, mask = batch
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        if self.loss == "cross entropy":
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
        losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(mask.shape)
        if self.loss == "masked mean":
            mean: Tensor = (losses * mask).sum() / mask.sum()
            return mean
        return torch.stack([(row * kept).sum() / kept.sum() for row, kept in zip(losses, mask, strict=True)]).mean()

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Times(L.Callback):
    """CPU time of each batch, in ms."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        """Notes when."""
        self._start = time.thread_time()

    def on_train_batch_end(self, *args: Any) -> None:
        """Notes how long."""
        self.steps.append(1e3 * (time.thread_time() - self._start))


@contextmanager
def uncorrected() -> Iterator[None]:
    """Within, nothing is counted or corrected."""
    start_counting = BatchScaling.start_counting

    def weights_only(self: Any, steps: Any, **_: Any) -> ScaledBatch:
        return ScaledBatch([microbatch.weight * steps.factor for microbatch in steps.microbatches], lambda: None)

    BatchScaling.start_counting = weights_only  # type: ignore[method-assign]
    try:
        yield
    finally:
        BatchScaling.start_counting = start_counting  # type: ignore[method-assign]


@contextmanager
def rehearsed(most: int) -> Iterator[None]:
    """Within, so many microbatches of a batch are rehearsed to count, the others count what the first does."""
    count = StepCounting.count

    def by_rehearsal(self: Any, steps: Any, index: int, *given: Any) -> Any:
        if index < most:
            self.last = count(self, replace(steps, state=None), index, *given)  # without a state no trace is used
        return self.last

    StepCounting.count = by_rehearsal  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        StepCounting.count = count  # type: ignore[method-assign]


def run(loss: str, width: int, num_blocks: int, num_steps: int, *, checks: bool) -> list[float]:
    """Times of the steps of one training."""
    torch.manual_seed(0)
    x = torch.randint(1, WORDS, (BATCH, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH, (BATCH, 1))).float()
    data = [(x, x.roll(-1, 1) * mask.long(), mask)] * num_steps
    times = Times()
    strategy = PipelineParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=MICROBATCHES, schedule="1f1b", check_first_batches=checks
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[times],
    )  # fmt: skip
    loader: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(SmallGPT(loss, width, num_blocks), loader)
    return times.steps


def main() -> None:
    """Runs all and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rehearsals", action="store_true")
    parser.add_argument("--losses", nargs="+", default=["cross entropy", "masked mean", "loop"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    tell = print if os.environ.get("RANK") == "1" else lambda *_, **__: None
    tell(f"{'loss':<16}{'without':>10}{'with':>10}{'ratio':>8}   first two batches: without, with, and checked (ms)")
    for loss in arguments.losses:
        found: dict[str, list[list[float]]] = {"without": [], "with": [], "checked": []}
        for _ in range(arguments.runs):
            shape = (loss, arguments.width, arguments.blocks, arguments.steps)
            with uncorrected():
                found["without"].append(run(*shape, checks=False))
            found["with"].append(run(*shape, checks=False))
            found["checked"].append(run(*shape, checks=True))
            for most in (1, MICROBATCHES) if arguments.rehearsals else ():
                with rehearsed(most):
                    found.setdefault(f"rehearsals: {most}", []).append(run(*shape, checks=False))
        later = {key: statistics.median(step for steps in runs for step in steps[4:]) for key, runs in found.items()}
        first = {key: statistics.median(sum(steps[:2]) for steps in runs) for key, runs in found.items()}
        tell(
            f"{loss:<16}{later['without']:>10.2f}{later['with']:>10.2f}{later['with'] / later['without']:>8.3f}   "
            f"{first['without']:.0f}, {first['with']:.0f}, {first['checked']:.0f}"
            + "".join(f"   {key}: {time:.2f}" for key, time in later.items() if ":" in key),
            flush=True,
        )


if __name__ == "__main__":
    main()
