"""Weight gradients of compiled code that wait for W are those of plain autograd, and nothing of them is left in I."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from deferred_parity import assert_same_gradients, plain_backward, split_backward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pp.runtime.compilation import CompiledUnits
from lightning_pp.runtime.split_backward.deferral import (
    WeightGradientQueue,
    collect_weight_gradients,
    weight_gradients_deferrable,
)

WIDTH = 16


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A transformer block whose activation edits in place what a product returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.merge = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.project(self.norm(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.merge(mixed)
        return x + self.narrow(F.relu(self.widen(x), inplace=True))


class Views(nn.Module):
    """Weights that are parts and transposes of Parameters, one of them used six times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.weight.chunk(3)
        h = F.linear(x, first).relu_() + x @ second.t() + torch.matmul(x, third.T)
        h = torch.bmm(h.reshape(2, -1, WIDTH), self.experts).reshape(x.shape)
        return h + x.matmul(self.weight[:WIDTH]) + torch.mm(x.flatten(0, 1), self.weight[WIDTH : 2 * WIDTH]).view_as(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shorten = nn.Conv1d(4, 8, 3, padding=1, stride=2)
        self.lengthen = nn.ConvTranspose1d(8, 4, 2, stride=2)
        self.grouped = nn.Conv1d(4, 4, 3, padding="same", groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.grouped(self.lengthen(F.relu(self.shorten(x), inplace=True)))


class Broken(nn.Module):
    """Two graphs, with a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(h) + h


class Frozen(nn.Module):
    """One weight of two is trained; a shared one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.second(self.first(x)).tanh())


CASES: list[tuple[type[nn.Module], int]] = [(Block, 4), (Views, 6), (Convolutions, 3), (Broken, 2), (Frozen, 2)]


def compiled(module: nn.Module, **options: object) -> CompiledUnits:
    units = CompiledUnits({"unit": module}, options)
    units.attach()
    return units


def inputs(*lengths: int) -> list[Tensor]:
    return [torch.randn(2, length, WIDTH, dtype=torch.float64) for length in lengths]


def check(
    module: nn.Module, microbatches: list[Tensor], wanted: int, backend: str, merged: tuple[int, ...] = ()
) -> None:
    expected = copy.deepcopy(module)
    units = compiled(module, backend=backend)
    gradients, lengths = split_backward(module, microbatches, merged=merged)
    torch.testing.assert_close(gradients, plain_backward(expected, microbatches), rtol=1e-12, atol=1e-12)
    assert_same_gradients(module, expected)
    assert lengths == [0 if index in merged else wanted for index in range(len(microbatches))]
    assert units.kept_in_backward() == []


@pytest.mark.by_day(3)
@pytest.mark.parametrize(("kind", "wanted"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_gradients_are_those_of_autograd(kind: type[nn.Module], wanted: int) -> None:
    check(kind().double(), inputs(4, 4, 4), wanted, "aot_eager", merged=(1,))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [*(pytest.param(*case, marks=pytest.mark.nightly) for case in CASES[:-1]), CASES[-1]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gradients_with_inductor(kind: type[nn.Module], wanted: int) -> None:
    check(kind().double(), inputs(4, 4, 4), wanted, "inductor", merged=(1,))


def test_lengths_that_vary_are_compiled_twice() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    check(Block().double(), inputs(4, 6, 7, 9, 4, 11), 4, counter)
    assert counter.frame_count == 2, "the first length, and any"


def test_i_leaves_the_weights_without_gradients() -> None:
    module = Block().double()
    compiled(module, backend="aot_eager")
    queue = WeightGradientQueue()
    with weight_gradients_deferrable():
        output = module(*inputs(4))
        with collect_weight_gradients(queue):
            output.sum().backward()
    without = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert without == {"project.weight", "merge.weight", "widen.weight", "narrow.weight"}
    assert {id(weight) for weight in queue.parameters()} == {id(module.get_parameter(name)) for name in without}
    queue.run()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_autocast_computes_as_without_deferral(backend: str) -> None:
    module = Block()
    expected = copy.deepcopy(module)
    compiled(module, backend=backend)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    microbatches = [x.float() for x in inputs(4, 4)]
    gradients, lengths = split_backward(module, microbatches, step)
    torch.testing.assert_close(gradients, plain_backward(expected, microbatches, step), rtol=0.05, atol=0.05)
    assert_same_gradients(module, expected, rtol=0.05, atol=0.05)  # bfloat16 has eight bits
    assert lengths == [4, 4]


def test_a_unit_that_is_run_again_in_i() -> None:
    module, (first, second) = Block().double(), inputs(4, 4)
    expected = copy.deepcopy(module)
    compiled(module, backend="aot_eager")
    gradients, lengths = split_backward(
        module, [first, second], lambda model, x: checkpoint(model, x, use_reentrant=False)
    )
    torch.testing.assert_close(gradients, plain_backward(expected, [first, second]), rtol=1e-12, atol=1e-12)
    assert_same_gradients(module, expected)
    assert lengths == [4, 4]


class Scaled(nn.Module):
    """A weight that is no Parameter and no view of one when the product uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.product = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(torch.arange(x.size(1)))
        return F.linear(x + rows, self.product.weight / 2)


def test_weights_that_cannot_wait_are_named() -> None:
    module = Scaled().double()
    expected = copy.deepcopy(module)
    units = compiled(module, backend="aot_eager")
    (x,) = inputs(4)
    gradients, lengths = split_backward(module, [x])
    torch.testing.assert_close(gradients, plain_backward(expected, [x]), rtol=1e-12, atol=1e-12)
    assert_same_gradients(module, expected)
    assert lengths == [0]
    assert units.kept_in_backward() == ["unit.product.weight"], "an embedding has nothing that could wait"


def test_weights_of_units_that_the_user_has_compiled_are_named() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    module.compile(backend="eager")
    assert CompiledUnits({"unit": module}, {}).kept_in_backward() == ["unit.0.weight"]


def test_without_a_split_backward_nothing_is_handed_out() -> None:
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        calls.append(len(inputs))
        return graph.forward

    module = Block().double()
    compiled(module, backend=backend)
    module(*inputs(4)).sum().backward()
    with weight_gradients_deferrable(), torch.no_grad():
        module(*inputs(4))
    num_parameters = len(list(module.parameters()))
    assert calls == [num_parameters + 1] * 2
