"""A dry run looks inside the tensors of torchao's float8 linears."""

from __future__ import annotations

import copy

import pytest
import torch
from float8_models import RECIPES, Float8Block, float8_config
from one_process import record_of
from torch import Tensor, nn
from torchao.float8 import convert_to_float8_training


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Float8Block() for _ in range(2)])

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_products_count_as_many_flops_as_plain_ones(recipe: str) -> None:
    plain, batch = Stack(), torch.randn(2, 8, 32)
    converted = convert_to_float8_training(copy.deepcopy(plain), config=float8_config(recipe))
    expected, actual = record_of(plain, batch), record_of(converted, batch)
    assert [call.flops for call in actual.calls] == [call.flops for call in expected.calls]
    assert [call.reads.nearest for call in actual.calls] == [call.reads.nearest for call in expected.calls]
