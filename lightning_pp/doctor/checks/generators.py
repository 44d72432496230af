"""Random numbers of the device, drawn by hooks outside of steps: the same on all stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.doctor.checks.trainings import Batch, Chain, batches, loader, num_blocks_for, trainer_for
from lightning_pp.doctor.findings import Check, Finding, Rank, Status

_NUM_BATCHES = 4


class Dropping(nn.Dropout):
    """Draws on the device within a step, on the stage that has it."""


class Augmented(Chain):
    """Adds noise to its batches on the device, and drops on its first stage alone."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.blocks[0] = nn.Sequential(self.blocks[0], Dropping(0.1))
        self.drawn: list[Tensor] = []

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        x, y = batch
        noise = torch.rand_like(x)
        self.drawn.append(noise)
        return x + 0.01 * noise, y


def draw(rank: Rank) -> dict[str, Any]:
    """What each batch drew on this rank, and what its generator gives afterwards; ranks start apart."""
    module = Augmented(num_blocks_for(rank))
    torch.manual_seed(100 + rank.rank)
    trainer = trainer_for(rank, callbacks=[])
    trainer.fit(module, loader(batches(_NUM_BATCHES)))
    # the first batch is looked at before the stages are known
    drawn = [float(noise.double().sum()) for noise in module.drawn[1:]]
    return {"drawn": drawn, "next": float(torch.rand((), device=rank.device))}


def judge(values: Sequence[dict[str, Any]]) -> list[Finding]:
    """Whether all ranks drew the same, and not the same in each batch."""
    advice = "Stages would see different batches: do not draw in on_after_batch_transfer; attach the JSON to an issue."
    for number, value in enumerate(values):
        if value != values[0]:
            found = f"Rank {number} drew other numbers on its device than rank 0 in on_after_batch_transfer."
            return [Finding(Status.FAILURE, found, advice, list(values))]
    drawn = values[0]["drawn"]
    if len(set(drawn)) < len(drawn) - 1:  # the first batch may be given twice
        return [Finding(Status.FAILURE, "Batches draw the same numbers again.", advice, list(values))]
    found = f"{len(values)} ranks drew the same numbers in {len(drawn)} batches."
    return [Finding(Status.OK, found, details=list(values))]


CHECKS = [
    Check(
        "generators",
        "random numbers that hooks draw on the device are the same on all stages",
        draw,
        judge,
        limit_s=60.0,
        advice="Do not draw on the device in on_after_batch_transfer; attach the JSON to an issue.",
    )
]
