"""A small model with deferred weight gradients, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

WIDTH = 6
NUM_TOKENS = 7
SEQUENCE = 4

WeightGradient = tuple[nn.Parameter, Tensor, Tensor]


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, queue: list[WeightGradient]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.weight.requires_grad:
            ctx.queue.append((ctx.weight, x, gradient))
        return gradient @ ctx.weight, None, None


class DeferredLinear(nn.Linear):
    """A linear layer whose weight gradient waits in ``queue`` until :func:`run_weight_gradients`."""

    def __init__(self, in_features: int, out_features: int, queue: list[WeightGradient]) -> None:
        super().__init__(in_features, out_features)
        self.queue = queue

    def forward(self, x: Tensor) -> Tensor:
        y = _DeferredLinear.apply(x, self.weight, self.queue)
        return y + self.bias


def run_weight_gradients(queue: list[WeightGradient]) -> None:
    for weight, x, gradient in queue:
        full = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        if weight.grad is None:
            weight.grad = full.to(weight.grad_dtype or full.dtype)
        else:
            weight.grad += full
    queue.clear()


class Block(nn.Module):
    """A residual MLP whose hidden width shards unevenly; with a buffer, and tensors in a dict and a tuple."""

    def __init__(self, queue: list[WeightGradient], use_checkpoint: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = DeferredLinear(WIDTH, 9, queue)
        self.down = DeferredLinear(9, WIDTH, queue)
        self.use_checkpoint = use_checkpoint
        self.num_runs = 0
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("num_calls", torch.tensor(0))

    def body(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        return self.down(torch.tanh(self.up(self.norm(x)))) * self.scale

    def forward(self, inputs: Mapping[str, Tensor], *, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        x = inputs["hidden"]
        with torch.no_grad():
            self.num_calls += 1
        y = checkpoint(self.body, x, use_reentrant=False) if self.use_checkpoint else self.body(x)
        if mask is not None:
            y = y * mask
        auxiliary = y.square().mean()
        # a view, as many real blocks return
        return (x + y).transpose(0, 1), {"auxiliary": auxiliary, "name": "block"}


def _call(block: nn.Module, h: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    y, extra = block({"hidden": h}, **kwargs)
    return y, extra["auxiliary"]


class Model(nn.Module):
    """embed, three blocks (the second called twice) and a head, with inter-unit code code between the calls.

    Args:
        tied: The head uses the weight of the embedding.
        checkpointing: "none", "inside" a block, "around" the call of a block, or that in the "reentrant" way.
    """

    def __init__(self, *, tied: bool = False, checkpointing: str = "none") -> None:
        super().__init__()
        self.queue: list[WeightGradient] = []
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(self.queue, checkpointing == "inside") for _ in range(3))
        self.head = DeferredLinear(WIDTH, NUM_TOKENS, self.queue)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointing = checkpointing
        self.skipped: set[int] = set()
        self.unused = nn.Linear(3, 5)

    def units(self) -> dict[str, nn.Module]:
        blocks = {f"blocks.{index}": block for index, block in enumerate(self.blocks)}
        return {"embed": self.embed, **blocks, "head": self.head, "unused": self.unused}

    def call_block(self, index: int, h: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if index in self.skipped:
            return h, h.new_zeros(())
        block = self.blocks[index]
        if self.checkpointing == "around":
            y, extra = checkpoint(block, {"hidden": h}, use_reentrant=False, **kwargs)
        elif self.checkpointing == "to the end":
            with set_checkpoint_early_stop(False):
                y, extra = checkpoint(block, {"hidden": h}, use_reentrant=False, **kwargs)
        elif self.checkpointing == "reentrant":
            y, auxiliary = checkpoint(_call, block, h, kwargs, use_reentrant=True)
            extra = {"auxiliary": auxiliary}
        else:
            y, extra = block({"hidden": h}, **kwargs)
        y = y.transpose(0, 1)
        if self.checkpointing != "reentrant":
            y += 0.01  # in place, on a view of what the unit gave
        return y, extra["auxiliary"]

    def first_stage(self, tokens: Tensor) -> Tensor:
        mask = (tokens > 1).unsqueeze(-1)
        h = self.embed(tokens)
        h, first = self.call_block(0, h, mask=mask.to(h.dtype))
        h, second = self.call_block(1, h)
        h, third = self.call_block(1, h * 1.1)
        return h + first + 2 * second + 3 * third

    def second_stage(self, h: Tensor, tokens: Tensor) -> Tensor:
        h, auxiliary = self.call_block(2, h)
        logits = self.head(h)
        targets = tokens.roll(-1, dims=1).flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets) + auxiliary

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second_stage(self.first_stage(tokens), tokens)


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options).to(dtype)


def make_microbatches(rank: int, count: int, seed: int = 100) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + rank)
    return [torch.randint(0, NUM_TOKENS, (2, SEQUENCE), generator=generator) for _ in range(count)]
