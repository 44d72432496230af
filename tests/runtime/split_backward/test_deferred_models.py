"""Split backward of whole models, of checkpointed blocks and of custom autograd functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from deferred_parity import Block, assert_parity, assert_same_gradients, gradients, plain_backward, split_backward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_pp.runtime.split_backward.deferral import (
    WeightGradientQueue,
    collect_weight_gradients,
    weight_gradients_deferrable,
)

# Whole models


def _encoder_layer(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=norm_first, batch_first=True)


class _CrossAttention(nn.Module):
    """Attention whose packed weight is used in slices."""

    def __init__(self, num_value_features: int | None = None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=num_value_features, vdim=num_value_features)
        self.num_value_features = num_value_features or 8

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.linspace(-1, 1, 6 * x.size(1) * self.num_value_features, dtype=x.dtype)
        memory = memory.view(6, x.size(1), self.num_value_features)
        return self.attention(x, memory, memory)[0]


@pytest.mark.parametrize(
    ("make", "num_queued"),
    [
        (lambda: _encoder_layer(False), 4),
        (lambda: _encoder_layer(True), 4),
        (lambda: _CrossAttention(), 3),  # of the query, of key and value together, and of the output
        (lambda: _CrossAttention(6), 4),
        (lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 7),
    ],
    ids=["encoder layer", "norm first", "cross attention", "cross attention of its own width", "decoder layer"],
)
@pytest.mark.parametrize("merged", [[], [1]], ids=["split", "mixed"])
def test_torch_modules(make: Callable[[], nn.Module], num_queued: int, merged: list[int]) -> None:
    torch.manual_seed(0)
    module = make().double()
    inputs = [torch.randn(3, 5, 8, dtype=torch.float64) for _ in range(3)]

    def step(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, x.flip(1)) if isinstance(module, nn.TransformerDecoderLayer) else module(x)

    assert_parity(module, inputs, step, num_queued, merged)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_transformers_models(architecture: str, is_checkpointed: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if architecture == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        num_queued = 2 * 4 + 1
    else:
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False,
        )  # fmt: skip
        num_queued = 2 * 7 + 1
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    tokens = [torch.randint(50, (2, 8)) for _ in range(3)]

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    assert_parity(model, tokens, step, num_queued)


# Activation checkpointing and custom functions


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_run_again_exactly_once(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)]).double()
    inputs = [torch.randn(2, 5, 8, dtype=torch.float64) for _ in range(2)]

    def step(model: nn.Module, x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    reference = copy.deepcopy(model)
    plain_backward(reference, inputs, step)
    _, lengths = split_backward(model, inputs, step)
    assert lengths == [18, 18]
    assert_same_gradients(model, reference)
    assert [block.num_forwards for block in model] == [4, 4, 4]  # F and once more in I, of each microbatch


def test_selective_checkpointing_and_offloading() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    keep_products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def step(model: nn.Module, x: Tensor) -> Tensor:
        x = checkpoint(model, x, use_reentrant=False, context_fn=keep_products)
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    assert_parity(model, [torch.randn(2, 3, 8, dtype=torch.float64) for _ in range(2)], step, num_queued=4)


class _RunsBackwardOnce(torch.autograd.Function):
    """Like the nodes of Transformer Engine: what it saved is gone after its first backward."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.saved = [x.detach()]
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * ctx.saved.pop().cos()


def test_functions_that_run_backward_once() -> None:
    torch.manual_seed(0)

    class Once(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _RunsBackwardOnce.apply(x)

    model = nn.Sequential(nn.Linear(6, 6), Once(), nn.Linear(6, 6), Once()).double()
    assert_parity(model, [torch.randn(3, 6, dtype=torch.float64) for _ in range(2)], num_queued=2)


class _Recompute(torch.autograd.Function):
    """Hand-made checkpointing: backward runs the function again and asks autograd.grad for all gradients."""

    @staticmethod
    def forward(ctx, function, x, *parameters):  # type: ignore[no-untyped-def]
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        return None, *torch.autograd.grad(output, (x, *ctx.parameters), gradient)


class _Solve(torch.autograd.Function):
    """Like implicit layers: backward iterates vector-Jacobian products with respect to the input alone."""

    @staticmethod
    def forward(ctx, function, x):  # type: ignore[no-untyped-def]
        ctx.function = function
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        for _ in range(3):
            gradient = gradient + torch.autograd.grad(output, x, gradient, retain_graph=True)[0] / 4
        return None, gradient


@pytest.mark.parametrize("view", [False, True])
def test_gradients_that_a_function_asks_for_in_its_backward(view: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]).double()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        first, second, third = model

        def run(x: Tensor) -> Tensor:
            return F.linear(x, second.weight.t() if view else second.weight, second.bias).tanh()

        x = _Recompute.apply(run, first(x), *second.parameters())
        return third(_Solve.apply(run, x))

    inputs = [torch.randn(3, 6, dtype=torch.float64) for _ in range(2)]
    assert_parity(model, inputs, step, num_queued=2)  # those of the second are asked for, not accumulated


def test_gradients_asked_for_in_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        score = model(x)
        penalty = torch.autograd.grad(score.sum(), x, create_graph=True)[0].square().sum()
        weight_gradient = torch.autograd.grad(score.sum(), model[0].weight, create_graph=True)[0]
        return score.mean() + penalty + weight_gradient.square().sum()

    assert_parity(model, [torch.randn(3, 6, dtype=torch.float64) for _ in range(2)], step)


def test_backward_of_some_inputs_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    queue = WeightGradientQueue()
    with weight_gradients_deferrable(), collect_weight_gradients(queue):
        model(x).sum().backward(inputs=[x, model[0].weight])
    assert len(queue) == 1
    queue.run()
    assert x.grad is not None
    assert [name for name, gradient in gradients(model).items() if gradient is not None] == ["0.weight"]


def test_graph_kept_and_run_twice() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 4).double()
    reference = copy.deepcopy(linear)
    x = torch.randn(3, 4, dtype=torch.float64)
    with weight_gradients_deferrable():
        output = linear(x)
        queue = WeightGradientQueue()
        with collect_weight_gradients(queue):
            output.sum().backward(retain_graph=True)
            output.square().sum().backward()
    assert len(queue) == 2
    queue.run()
    (reference(x).sum() + reference(x).square().sum()).backward()
    assert_same_gradients(linear, reference)


def test_output_that_gets_no_gradient() -> None:
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):  # type: ignore[no-untyped-def]
            return x + y

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient, None

    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).double()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return NoGradient.apply(model[0](x), model[1](x))

    assert_parity(model, [torch.randn(3, 4, dtype=torch.float64)], step, num_queued=1)
    assert model[1].weight.grad is None
