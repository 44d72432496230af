"""Cuts that send many outputs are named, by counting what layers need that look at all before them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_parts import VOCAB, WIDTH, Block, next_token_loss
from one_process import build, record_of
from torch import Tensor, nn

from lightning_pp.split.cut.wide_cuts import WideCut, wide_cuts
from lightning_pp.split.record.plan import build_plan

ROWS, LENGTH, NUM_LAYERS = 2, 6, 6


class Residual(nn.Module):
    """Layers whose residual is outside (``h + layer(h)``) or inside of them; ``drops``: with dropout out there."""

    def __init__(self, outside: bool, drops: bool = False) -> None:
        super().__init__()
        self.outside, self.drops = outside, drops
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) if outside else Block() for _ in range(NUM_LAYERS)
        )

    def training_step(self, batch: Tensor) -> Tensor:
        h = self.embedding(batch)
        for layer in self.layers:
            if self.drops:
                h = h + F.dropout(layer(h), 0.5)
            else:
                h = h + layer(h) if self.outside else layer(h)
        return next_token_loss(self.head(h), batch)


@pytest.mark.parametrize("first", [2, 5])
def test_each_output_crosses_where_random_numbers_are_drawn_outside_of_units(first: int) -> None:
    """Before layer ``first`` the embedding's output and those of the layers up to there cross, all of one size."""
    (cut,) = find(build(lambda: Residual(outside=True, drops=True)), first)
    one = ROWS * LENGTH * WIDTH * torch.float64.itemsize
    assert (cut.before, cut.unit) == (f"layers.{first - 1}", f"layers.{first}")
    assert (cut.num_tensors, cut.output_bytes, cut.crossing_bytes) == (first + 1, one, (first + 1) * one)
    assert cut.lines and all("test_wide_cuts.py" in line for line in cut.lines)
    assert f"{first + 1:.1f} times" in str(cut)


def test_two_tensors_are_not_many() -> None:
    assert find(build(lambda: Residual(outside=True, drops=True)), 1) == []


@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("outside", [False, True])
def test_a_residual_crosses_as_one(first: int, outside: bool) -> None:
    assert find(build(lambda: Residual(outside=outside)), first) == []


def find(module: nn.Module, first: int) -> list[WideCut]:
    """The wide cuts of two stages, the second of which starts with layer ``first``."""
    record = record_of(module, torch.randint(0, VOCAB, (ROWS, LENGTH)))
    order = list(record.first_calls())
    stages = {unit: int(index >= order.index(f"layers.{first}")) for index, unit in enumerate(order)}
    return wide_cuts(build_plan(record, stages, 2))
