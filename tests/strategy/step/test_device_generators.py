"""What hooks draw on a device is the same on all stages; here a generator stands for the device's own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from pipelined_fit import fit
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor, nn

from lightning_pp.errors import BatchError
from lightning_pp.split.side_effects import generators

OF_DEVICE = torch.Generator()


class DrawingBlock(nn.Linear):
    """Draws as dropout does on a device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0 * torch.rand(x.shape, generator=OF_DEVICE))


class Augmented(Blocks):
    def __init__(self) -> None:
        super().__init__()
        # three draws on the first stage, none on the last
        self.blocks = nn.ModuleList([*(DrawingBlock(8, 8) for _ in range(3)), *(nn.Linear(8, 8) for _ in range(3))])
        self.drawn: list[Tensor] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        noise = torch.rand(x.shape, generator=OF_DEVICE)
        self.drawn.append(noise)
        return x + noise, y


def run(*, known: bool, seeded_alike: bool) -> Any:
    OF_DEVICE.manual_seed(3 if seeded_alike else int(os.environ["RANK"]))
    before = dict(generators.OF_DEVICES)
    if known:
        generators.OF_DEVICES["cpu"] = lambda device: [OF_DEVICE]
    module = Augmented()
    try:
        fit(module, max_epochs=2)
        return module.drawn, torch.rand(1, generator=OF_DEVICE)
    except BatchError as error:
        return str(error)
    finally:
        generators.OF_DEVICES.clear()
        generators.OF_DEVICES.update(before)


@pytest.mark.parametrize("seeded_alike", [True, False])
def test_hooks_of_batches_draw_the_same_on_every_stage(pool: WorkerPool, seeded_alike: bool) -> None:
    (first, next_of_first), (second, next_of_second) = pool.run(
        run, known=True, seeded_alike=seeded_alike, world_size=2
    )
    assert len(first) == len(second) >= 6
    # one draw comes before the stages are known: the first batch is looked at to find them
    for mine, others in zip(first[1:], second[1:], strict=True):
        assert torch.equal(mine, others)
    assert len({float(noise.sum()) for noise in first[1:]}) == len(first) - 1
    assert torch.equal(next_of_first, next_of_second)


def test_batches_that_hooks_make_different_are_refused(pool: WorkerPool) -> None:
    for told in pool.run(run, known=False, seeded_alike=False, world_size=2):
        assert "differs after on_after_batch_transfer at batch[0]: rank 0 and rank 1 gave the step 2 different" in told
