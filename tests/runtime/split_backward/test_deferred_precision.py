"""Deferred weight gradients under autocast and in low precision, and gradients of other dtypes and layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from deferred_parity import gradients, plain_backward, seed_gradient, split_backward
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_pp.runtime.split_backward.deferral import (
    WeightGradientQueue,
    collect_weight_gradients,
    weight_gradients_deferrable,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class ConvStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(8, 16, 3, padding=1)
        self.grouped = nn.Conv1d(16, 16, 3, groups=4, bias=False)
        self.up = nn.ConvTranspose1d(16, 8, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.grouped(self.stem(x).relu()).relu())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value = (nn.Linear(16, 16, bias=bias) for bias in (True, False, True))
        self.output = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = self.query(normed), self.key(normed), self.value(normed)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.output(mixed.mT.contiguous().mT)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 16))
        self.bias = nn.Parameter(torch.randn(16))
        self.second = nn.Parameter(torch.randn(16, 16))
        self.experts = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.reshape(-1, 16), self.first)
        rows = rows.tanh() @ self.second + F.linear(rows, self.second.t())
        return torch.bmm(rows.view(4, -1, 16), self.experts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "shape"), [(Attention, (4, 6, 16)), (ConvStack, (4, 8, 10)), (Products, (4, 6, 16))])
@pytest.mark.parametrize("merged", [[], [0, 1, 2]], ids=["split", "merged"])
def test_autocast_is_matched_bit_for_bit(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, device: str, merged: list[int]
) -> None:
    torch.manual_seed(0)
    module = make().to(device)
    reference = copy.deepcopy(module)
    inputs = [torch.randn(shape, device=device) for _ in range(3)]

    def step(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(device, dtype):
            output = module(x)
        assert output.dtype == (torch.float32 if make is Attention else dtype)
        return output.float()

    expected = plain_backward(reference, inputs, step)
    actual, lengths = split_backward(module, inputs, step, merged)
    assert all(lengths) != bool(merged)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    if make is Products:  # `second` is used twice: autocast adds its two gradients in low precision, we in float32
        module.second.grad = reference.second.grad = None
    torch.testing.assert_close(gradients(module), gradients(reference), rtol=0, atol=0)


def test_autocast_keeps_one_copy_of_what_several_projections_read() -> None:
    module, x = Attention(), torch.randn(4, 6, 16)
    queue = WeightGradientQueue()
    with weight_gradients_deferrable():
        with torch.autocast("cpu", torch.bfloat16):
            output = module(x)
        with collect_weight_gradients(queue):
            output.backward(torch.ones_like(output))
    # In bfloat16: the normed and the mixed input, and four output gradients.
    assert len(queue) == 4
    assert queue.held_bytes == 2 * (2 + 4) * x.numel()


def test_autocast_cache_is_not_filled_with_what_has_no_gradient() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    with weight_gradients_deferrable(), torch.autocast("cpu", torch.bfloat16):
        deferred = linear(x)
        plain = torch.einsum("nk,mk->nm", x, linear.weight)
    assert plain.requires_grad
    (deferred + plain).sum().backward()
    torch.testing.assert_close(linear.weight.grad, 2 * x.sum(0).expand(8, 8), rtol=0.02, atol=0.02)


def test_autocast_leaves_float64_alone() -> None:
    module = Attention().double()
    reference = copy.deepcopy(module)
    x = torch.randn(2, 3, 16, dtype=torch.float64)

    def linear_only(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module.query(x)

    expected = plain_backward(reference, [x], linear_only)
    actual, _ = split_backward(module, [x], linear_only)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(module), gradients(reference), rtol=1e-12, atol=1e-12)


def test_w_inside_autocast_is_not_rounded() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 64), torch.randn(128, 64)
    queue = WeightGradientQueue()
    with weight_gradients_deferrable():
        output = linear(x)
        with collect_weight_gradients(queue):
            output.backward(torch.ones_like(output))
    with torch.autocast("cpu", torch.bfloat16):
        queue.run()
    torch.testing.assert_close(linear.weight.grad, x.sum(0).expand(64, 64))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_under_autocast(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    module = Attention()
    reference = copy.deepcopy(module)
    inputs = [torch.randn(2, 3, 16) for _ in range(2)]

    def step(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(module, x, use_reentrant=use_reentrant)

    expected = plain_backward(reference, inputs, step)
    actual, lengths = split_backward(module, inputs, step)
    assert lengths == [4, 4]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(module), gradients(reference), rtol=0, atol=0)


def test_second_derivative_of_a_weight_gradient_under_autocast_is_refused() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    with weight_gradients_deferrable():
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear(x).float().square().sum()
        (gradient,) = torch.autograd.grad(loss, linear.weight, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives outside autocast"):
            gradient.sum().backward()


def test_gradient_penalty_under_autocast() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    reference = copy.deepcopy(network)
    inputs = [torch.randn(5, 8) for _ in range(2)]

    def step(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            score = module(x)
        (gradient,) = torch.autograd.grad(score.float().sum(), x, create_graph=True)
        return gradient.norm(dim=1)

    plain_backward(reference, inputs, step)
    split_backward(network, inputs, step)
    # autocast adds the two terms of each gradient in bfloat16, we in float32
    torch.testing.assert_close(gradients(network), gradients(reference), rtol=0.02, atol=0.002)


def test_float32_gradients_of_bfloat16_weights() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16, bias=False), nn.Conv1d(6, 6, 3)).bfloat16()
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    reference = copy.deepcopy(module)
    for parameter in reference.parameters():
        parameter.grad_dtype = torch.float32
    inputs = [torch.randn(2, 6, 16, dtype=torch.bfloat16) for _ in range(4)]
    expected = plain_backward(reference, inputs)
    actual, lengths = split_backward(module, inputs)
    assert lengths == [3] * 4
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients(module).values())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(module), gradients(reference), rtol=0, atol=0)


class _Allocations(TorchDispatchMode):
    """Names the operations that made a new storage of a given number of elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        is_of_size = isinstance(result, Tensor) and result.numel() == self.numel
        if is_of_size and result.untyped_storage().data_ptr() not in known:
            self.names.append(str(function))
        return result


@pytest.mark.parametrize(
    ("weight", "run"),
    [
        ((24, 40), lambda x, w: F.linear(x, w)),
        ((40, 24), lambda x, w: x @ w),
        ((40, 24), lambda x, w: F.linear(x, w.t())),
        ((2, 40, 24), lambda x, w: torch.bmm(x, w)),
    ],
)
def test_later_microbatches_add_in_place(weight: tuple[int, ...], run: Callable[[Tensor, Tensor], Tensor]) -> None:
    parameter = nn.Parameter(torch.randn(weight))
    queues = [WeightGradientQueue() for _ in range(3)]
    for queue in queues:
        with weight_gradients_deferrable():
            output = run(torch.randn(2, 5, 40), parameter)
            with collect_weight_gradients(queue):
                output.backward(seed_gradient(output))
    queues[0].run()
    assert parameter.grad is not None
    address = parameter.grad.data_ptr()
    with _Allocations(parameter.numel()) as allocations:
        queues[1].run()
        queues[2].run()
    assert allocations.names == []
    assert parameter.grad.data_ptr() == address


def test_first_gradient_has_the_strides_of_the_parameter() -> None:
    torch.manual_seed(0)
    channels_last = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    transposed = nn.Linear(4, 8)
    transposed.weight = nn.Parameter(torch.randn(4, 8).t())
    for module, shape in ((channels_last, (2, 4, 6, 6)), (transposed, (2, 4))):
        split_backward(module, [torch.randn(shape)])
        assert module.weight.grad is not None
        assert module.weight.grad.stride() == module.weight.stride()


def test_gradient_with_other_strides_than_the_weight_of_which_a_view_is_used() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    weight.grad = torch.zeros(4, 6, dtype=torch.float64).t()
    module = nn.Module()
    module.weight = weight
    x = torch.randn(3, 4, dtype=torch.float64)
    _, lengths = split_backward(module, [x], lambda m, x: F.linear(x, m.weight[2:5]))
    assert lengths == [1]
    expected = torch.zeros(6, 4, dtype=torch.float64)
    expected[2:5] = seed_gradient(torch.empty(3, 3, dtype=torch.float64)).t() @ x
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transpose", [False, True])
def test_weight_tied_to_an_embedding_with_sparse_gradients(transpose: bool) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
    reference = copy.deepcopy(embedding)
    tokens = [torch.randint(10, (3, 5)) for _ in range(2)]

    def step(module: nn.Module, tokens: Tensor) -> Tensor:
        embedded = module(tokens).tanh()
        if transpose:
            return embedded @ module.weight.t()
        return F.linear(embedded, module.weight)

    reference.sparse = False
    plain_backward(reference, tokens, step)
    _, lengths = split_backward(embedding, tokens, step)
    assert lengths == [1, 1]
    torch.testing.assert_close(embedding.weight.grad, reference.weight.grad, rtol=1e-12, atol=1e-12)
