"""Grouped products, as mixtures of experts have them, against plain autograd, bit for bit; they have no float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers_by_hand
from deferred_parity import assert_parity, assert_same_gradients, call, plain_backward, seed_gradient, split_backward
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_pp.runtime.split_backward.deferral import (
    WeightGradientQueue,
    collect_weight_gradients,
    weight_gradients_deferrable,
)

ENDS = torch.tensor([3, 3, 7, 12], dtype=torch.int32)  # the second expert has no row
Product = Callable[[Tensor, Tensor], Tensor]
PRODUCTS: dict[str, Product] = {
    "F.grouped_mm": lambda x, w: F.grouped_mm(x, w, offs=ENDS),
    "torch._grouped_mm": lambda x, w: torch._grouped_mm(x, w, ENDS),
}


class Experts(nn.Module):
    """Two layers of four experts, the second with a weight that is stored transposed, as transformers has it."""

    def __init__(self, product: Product, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product = product
        self.up = Parameter(torch.randn(4, 16, 32, dtype=dtype))
        self.down = Parameter(torch.randn(4, 16, 32, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.product(x, self.up).relu(), self.down.transpose(-2, -1))


@pytest.mark.parametrize("merged", [[], [1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_are_those_of_plain_autograd(name: str, dtype: torch.dtype, merged: list[int]) -> None:
    inputs = [torch.randn(12, 16, dtype=dtype) for _ in range(3)]
    # a merged microbatch has its weight gradients in B, before those of the others: rounding differs then
    tolerance = (0.02 if dtype is torch.bfloat16 else 1e-5) if merged else 0.0
    bounds = {"of_inputs": 0.0, "rtol": tolerance, "atol": 10 * tolerance}
    assert_parity(Experts(PRODUCTS[name], dtype), inputs, num_queued=2, merged=merged, **bounds)


@pytest.mark.parametrize("frozen", ["up", "down"])
def test_a_frozen_weight_gets_no_gradient(frozen: str) -> None:
    module = Experts(PRODUCTS["F.grouped_mm"], torch.bfloat16)
    getattr(module, frozen).requires_grad_(False)
    reference = copy.deepcopy(module)
    inputs = [torch.randn(12, 16, dtype=torch.bfloat16)]
    plain_backward(reference, inputs)
    _, num_queued = split_backward(module, inputs)
    assert num_queued == [1] and getattr(module, frozen).grad is None
    assert_same_gradients(module, reference, rtol=0, atol=0)


@pytest.mark.parametrize(
    "step",
    [
        lambda module, x: F.grouped_mm(x.expand(4, 4, 16), module.up),  # a batch of products, without offsets
        lambda module, x: F.grouped_mm(x.expand(4, 4, 16), module.up[0], offs=torch.tensor([8, 16, 20, 32]).int()),
        lambda module, x: F.grouped_mm(x, module.up * 2, offs=torch.tensor([1, 2, 3, 4]).int()),
    ],
    ids=["batch", "columns", "computed weight"],
)
def test_other_forms_are_left_to_autograd(step: Callable[[nn.Module, Tensor], Tensor]) -> None:
    module = Experts(PRODUCTS["F.grouped_mm"], torch.bfloat16)
    reference = copy.deepcopy(module)
    inputs = [torch.randn(4, 16, dtype=torch.bfloat16)]
    plain_backward(reference, inputs, step)
    _, num_queued = split_backward(module, inputs, step)
    assert num_queued == [0]
    assert_same_gradients(module, reference, rtol=0, atol=0)


def test_experts_of_transformers_wait_for_w() -> None:
    """After I no matrix of Mixtral has a gradient; after W all have autograd's."""
    model = transformers_by_hand.mixtral().model.bfloat16()
    model.set_experts_implementation("grouped_mm")
    experts = model.model.layers[0].mlp.experts
    reference = copy.deepcopy(experts)
    hidden, weights = torch.randn(6, experts.hidden_dim, dtype=torch.bfloat16), torch.rand(6, 2, dtype=torch.bfloat16)
    chosen = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [1, 0], [0, 1]])

    def step(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, chosen, weights)

    plain_backward(reference, [hidden], step)
    queue = WeightGradientQueue()
    with weight_gradients_deferrable():
        output = step(experts, hidden.requires_grad_())
        with collect_weight_gradients(queue):
            output.backward(seed_gradient(output))
    assert all(parameter.grad is None for parameter in experts.parameters()) and len(queue) == 2
    queue.run()
    assert_same_gradients(experts, reference, rtol=0, atol=0)


def test_second_derivatives() -> None:
    module = Experts(PRODUCTS["F.grouped_mm"], torch.float32)
    input = torch.randn(12, 16)

    def penalty() -> Tensor:
        leaf = input.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(call(module, leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), module.up)[0]

    expected = penalty()
    with weight_gradients_deferrable():
        torch.testing.assert_close(penalty(), expected)
