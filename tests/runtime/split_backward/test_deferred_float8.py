"""torchao's float8 linears, emulated on CPUs, against torchao's own backward, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from deferred_parity import assert_parity, assert_same_gradients, call, plain_backward, split_backward
from float8_models import RECIPES, Float8Block, float8_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

from lightning_pp.runtime.split_backward.deferral import weight_gradients_deferrable


def float8_block(recipe: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return convert_to_float8_training(Float8Block().to(dtype), config=float8_config(recipe))


@pytest.mark.parametrize("merged", [[], [1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_torchaos(recipe: str, dtype: torch.dtype, merged: list[int]) -> None:
    inputs = [torch.randn(2, 5, 32, dtype=dtype) for _ in range(3)]
    # a merged microbatch has its weight gradients in B, before those of the others: rounding of the sum differs then
    tolerance = (0.02 if dtype is torch.bfloat16 else 1e-5) if merged else 0.0
    bounds = {"of_inputs": 0.0, "rtol": tolerance, "atol": 10 * tolerance}
    assert_parity(float8_block(recipe, dtype), inputs, num_queued=4, merged=merged, **bounds)


def test_checkpointed_blocks_and_frozen_weights() -> None:
    reference = float8_block("tensorwise")
    reference.up.weight.requires_grad_(False)
    module = copy.deepcopy(reference)
    inputs = [torch.randn(2, 5, 32) for _ in range(2)]

    def step(module: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(module, x, use_reentrant=False)
        return output

    plain_backward(reference, inputs, step)
    _, num_queued = split_backward(module, inputs, step)
    assert num_queued == [3, 3] and module.up.weight.grad is None
    assert_same_gradients(module, reference, rtol=0, atol=0)


def test_the_scope_leaves_torchao_as_it_was() -> None:
    before = matmul_with_hp_or_float8_args.apply
    with weight_gradients_deferrable():
        assert matmul_with_hp_or_float8_args.apply != before
    assert matmul_with_hp_or_float8_args.apply == before
    assert "apply" not in vars(matmul_with_hp_or_float8_args)


def test_an_input_that_torchao_has_cast_keeps_its_gradient_in_i() -> None:
    """Such as the outputs of torchao's parallel styles: they are float8 already, and no plain tensors."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    linear = convert_to_float8_training(nn.Sequential(nn.Linear(16, 8)), config=float8_config("tensorwise"))[0]
    reference = copy.deepcopy(linear)
    inputs = [torch.randn(4, 16)]

    def step(module: nn.Module, x: Tensor) -> Tensor:
        return call(module, hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, module.linear_mm_config))

    plain_backward(reference, inputs, step)
    _, num_queued = split_backward(linear, inputs, step)
    assert num_queued == [0]
    assert_same_gradients(linear, reference, rtol=0, atol=0)
