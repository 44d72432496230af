"""Comparison of the split backward with plain autograd, shared by the tests of deferred weight gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pp.runtime.split_backward.deferral import (
    WeightGradientQueue,
    collect_weight_gradients,
    weight_gradients_deferrable,
)

Step = Callable[[nn.Module, Tensor], Tensor]


def call(module: nn.Module, input: Tensor) -> Tensor:
    return module(input)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same_gradients(actual: nn.Module, expected: nn.Module, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    expected_gradients = gradients(expected)
    for name, gradient in gradients(actual).items():
        wanted = expected_gradients[name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def seed_gradient(output: Tensor) -> Tensor:
    """Some gradient of the output, the same for the same shape."""
    generator = torch.Generator().manual_seed(output.numel())
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def plain_backward(module: nn.Module, inputs: Sequence[Tensor], step: Step = call) -> list[Tensor | None]:
    """Backward of every microbatch by plain autograd; returns the inputs' gradients."""
    leaves = [_leaf(input) for input in inputs]
    for leaf in leaves:
        output = step(module, leaf)
        output.backward(seed_gradient(output))
    return [leaf.grad for leaf in leaves]


def split_backward(
    module: nn.Module, inputs: Sequence[Tensor], step: Step = call, merged: Sequence[int] = ()
) -> tuple[list[Tensor | None], list[int]]:
    """Runs F0 F1 ... I0 I1 ... W0 W1 ..., with a B where ``merged`` says so.

    Returns:
        The inputs' gradients, and how many weight gradients each microbatch queued.
    """
    leaves = [_leaf(input) for input in inputs]
    queues = [WeightGradientQueue() for _ in inputs]
    with weight_gradients_deferrable():
        outputs = [step(module, leaf) for leaf in leaves]
        for index, (output, queue) in enumerate(zip(outputs, queues, strict=True)):
            gradient = seed_gradient(output)
            if index in merged:
                output.backward(gradient)
            else:
                with collect_weight_gradients(queue):
                    output.backward(gradient)
    lengths = [len(queue) for queue in queues]
    for index, queue in enumerate(queues):
        if index not in merged:
            queue.run()
    return [leaf.grad for leaf in leaves], lengths


def assert_parity(
    module: nn.Module,
    inputs: Sequence[Tensor],
    step: Step = call,
    num_queued: int | None = None,
    merged: Sequence[int] = (),
    *,
    of_inputs: float = 1e-12,
    rtol: float = 1e-12,
    atol: float = 1e-12,
) -> None:
    """Asserts that a split backward gives the gradients of plain autograd, by default to float64's rounding.

    Args:
        module: Left with the gradients of the split backward.
        inputs: One a microbatch.
        step: What F does.
        num_queued: How many weight gradients I has to queue for a microbatch that is not merged.
        merged: Which microbatches get a B.
        of_inputs: How far the inputs' gradients may differ.
        rtol: The same of the weights' gradients.
        atol: As above.
    """
    reference = copy.deepcopy(module)
    expected = plain_backward(reference, inputs, step)
    actual, lengths = split_backward(module, inputs, step, merged)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=of_inputs, atol=of_inputs)
    assert_same_gradients(module, reference, rtol, atol)
    if num_queued is not None:
        assert lengths == [0 if index in merged else num_queued for index in range(len(inputs))]


def collected(output: Tensor, gradient: Tensor | None = None) -> WeightGradientQueue:
    """The queue of a backward of ``output``."""
    queue = WeightGradientQueue()
    with collect_weight_gradients(queue):
        output.backward(seed_gradient(output) if gradient is None else gradient)
    return queue


class Block(nn.Module):
    """A transformer block that counts its forwards."""

    def __init__(self, width: int = 8, num_heads: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.output = nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        normed = self.norm1(x)
        heads = [
            project(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _leaf(input: Tensor) -> Tensor:
    return input.detach().requires_grad_(input.is_floating_point())
