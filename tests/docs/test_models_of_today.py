"""The blocks of ``docs/training/models.md`` train on two ranks as on one device."""

from __future__ import annotations

import itertools
import os
import re
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Losses
from test_code_blocks import DOCS, blocks
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy

PAGE = DOCS / "training" / "models.md"
BLOCKS = {re.findall(r"class (\w+)\(L\.LightningModule\)", text)[0]: text for text in blocks(PAGE, "python")}


def classes(generator: torch.Generator, width: int) -> Any:
    return torch.randn(8, width, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def batch_of(kind: str, number: int) -> Any:
    """Float32 batches, of other shapes each where they may be."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 20, (4, 128 if kind == "Documents" else 9 + number), generator=generator)
    if kind == "Speech":
        lengths = torch.tensor([12 + number, 15, 13, 14])
        frames = torch.randn(4, int(lengths.max()), 40, generator=generator)
        return frames, lengths, torch.randint(1, 30, (4, 5), generator=generator), torch.tensor([5, 3, 4, 5])
    if kind == "PackedText":
        starts = torch.tensor([0, *itertools.accumulate((5, 3 + number, 4, 6))])
        ids = torch.randint(0, 20, (1, int(starts[-1])), generator=generator)
        return {"input_ids": ids, "labels": ids.index_fill(1, starts[:-1], -100), "cu_seqlens": starts}
    if kind == "VisionLanguage":
        axes = torch.randint(0, 9, (3, *tokens.shape), generator=generator)
        return {"input_ids": tokens, "position_ids": axes}
    return tokens if kind == "Documents" else classes(generator, 32 if kind == "InFloat8" else 16)


def train(kind: str, devices: int) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: runs the block, and trains what it defines for three batches."""
    found = Losses()
    page = sys.modules["page"] = ModuleType("page")  # what a strategy replaces for a fit it looks for in modules
    names = vars(page)
    names |= {"L": L, "torch": torch, "PipelineParallelStrategy": PipelineParallelStrategy}
    try:
        exec(compile(BLOCKS[kind], f"{PAGE.name}, {kind}", "exec"), names)
        L.seed_everything(5)
        module = names[kind]()
        run = trainer(devices, names["strategy"] if devices > 1 else "auto", callbacks=[found])
        with mock.patch.object(flex, "_validate_device", return_value=None):  # torch refuses a backward on CPUs
            run.fit(module, DataLoader([batch_of(kind, number) for number in range(3)], batch_size=None))
        held = {name: value for name, value in module.named_parameters() if not value.is_meta}
        return found.losses, {name: value.detach().clone() for name, value in held.items()}
    finally:
        del sys.modules["page"]
        os.environ.pop("PL_GLOBAL_SEED", None)


def test_the_page_has_every_kind() -> None:
    assert list(BLOCKS) == [
        "Speech", "Documents", "PackedText", "VisionLanguage", "WithMuon", "InFloat8", "WithMixup"
    ]  # fmt: skip


# by day tests/parity and tests/recipes train models of these kinds
AT_NIGHT = ("Documents", "InFloat8", "PackedText", "Speech", "WithMuon")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] if kind in AT_NIGHT else []) for kind in BLOCKS]
)
def test_trains_as_on_one_device(pool: WorkerPool, kind: str) -> None:
    ((expected, weights),) = pool.run(train, kind, 1, world_size=1, timeout=120)
    # Muon iterates in bfloat16; a microbatch has scales of its own in float8
    tolerance = {"WithMuon": 2e-3, "InFloat8": 3e-2}.get(kind, 1e-5)
    held: dict[str, Tensor] = {}
    for losses, own in pool.run(train, kind, 2, world_size=2, timeout=120):
        assert losses == pytest.approx(expected, rel=tolerance)
        held |= own
    assert held.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(held[name], value, rtol=tolerance, atol=tolerance)
