"""Models of transformers ask of a mask whether it is full, and go another way then: losses are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diagnosed_models import Trained
from extra_steps import Losses
from pipelined_fit import trainer
from pool import WorkerPool
from torch.utils.data import DataLoader
from transformers_by_config import generic

from lightning_pp import PipelineParallelStrategy

#: Of each batch whether its mask is full.
BATCHES = {
    "full": (True, True, True, True),
    "full at first": (True, True, False, True, False),
    "padded at first": (False, True, False, True),
}


def losses_of(model_type: str, are_full: tuple[bool, ...], devices: int) -> list[float]:
    torch.manual_seed(1)
    make, batch = generic("causal", model_type)
    batches = [batch(8) for _ in are_full]
    for each, is_full in zip(batches, are_full, strict=True):
        mask = torch.ones_like(each["attention_mask"])
        if not is_full:
            mask[1, -3:] = mask[6, -2:] = 0  # the other microbatches are full
        each["attention_mask"] = mask
        each["labels"] = torch.where(mask == 1, each["input_ids"], -100)
    noted = Losses()
    strategy: Any = PipelineParallelStrategy(2, num_microbatches=4) if devices > 1 else "auto"
    run = trainer(devices=devices, strategy=strategy, callbacks=[noted])
    torch.manual_seed(2)
    run.fit(Trained(make()), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return noted.found


@pytest.mark.by_day(1)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_may_be_full_or_padded(pool: WorkerPool, name: str, model_type: str) -> None:
    (expected,) = pool.run(losses_of, model_type, BATCHES[name], 1, world_size=1, timeout=120)
    of_ranks = pool.run(losses_of, model_type, BATCHES[name], 2, world_size=2, timeout=120)
    assert len(expected) == len(BATCHES[name])
    for found in of_ranks:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
