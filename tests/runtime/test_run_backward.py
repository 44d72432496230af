"""The engine is started as torch starts it, and still refuses gradients that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pp.runtime._torch_private import run_backward


def outputs_of(weight: Tensor) -> list[Tensor | GradientEdge]:
    """A tensor and an edge that hang on ``weight``."""
    return [(weight * 2).sum(), get_gradient_edge(weight.square())]


def test_gradients_are_those_of_torchs_call() -> None:
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradients = [torch.tensor(0.5, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)]
    torch.autograd.backward(outputs_of(weight), gradients)
    expected, weight.grad = weight.grad, None
    run_backward(outputs_of(weight), gradients)
    run_backward(outputs_of(weight), gradients)
    assert expected is not None and weight.grad is not None
    torch.testing.assert_close(weight.grad, 2 * expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_edge", [False, True])
def test_a_gradient_of_another_shape_is_refused(is_edge: bool) -> None:
    output = torch.randn(3, 4, requires_grad=True).exp()
    with pytest.raises(RuntimeError, match="shape"):
        run_backward([get_gradient_edge(output) if is_edge else output], [torch.ones(4, 3)])
