"""Parts that the architectures of the tests share, and their batches.

Length letters in comments: B samples, T tokens, D features, C channels, V words.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 24
WIDTH = 8


class Architecture(nn.Module):
    """A model with a training step, as a LightningModule is; ``log`` is replaced by whoever runs the step."""

    def log(self, name: str, value: Any) -> None:
        raise AssertionError("nobody listens")

    def training_step(self, batch: Any) -> Any:
        raise NotImplementedError

    def validation_step(self, batch: Any) -> Any:
        return self.training_step(batch)


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, causal: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))


class StateSpaceLayer(nn.Module):
    """A selective state space, scanned step by step."""

    def __init__(self, width: int = WIDTH, states: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 2 * width)
        self.decay = nn.Parameter(-torch.rand(width, states))
        self.write = nn.Linear(width, states)
        self.read = nn.Linear(width, states)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        state, outputs = u.new_zeros(*u[:, 0].shape, self.decay.shape[1]), []
        for t in range(x.shape[1]):
            state = state * self.decay.exp() + u[:, t, :, None] * self.write(u[:, t])[:, None]
            outputs.append((state * self.read(u[:, t])[:, None]).sum(-1))
        return x + self.out(torch.stack(outputs, 1) * F.silu(gate))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(count: int, length: int = 6) -> Tensor:
    return torch.randint(0, VOCAB, (count, length))


def regression_batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4), torch.randn(count, 3)


def image_batch(count: int) -> list[Tensor]:
    return [torch.randn(count, 3, 8, 8), torch.randint(0, 5, (count,))]


def pair_batch(count: int) -> dict[str, Tensor]:
    return {"image": torch.randn(count, 3, 8, 8), "text": tokens_of(count)}


def doubled(tree: Any) -> Any:
    """Float tensors as float64, in the containers that the batches here are made of."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: doubled(value) for key, value in tree.items()}
    return type(tree)(doubled(value) for value in tree)


class Small(Architecture):
    """Embedding, four blocks, head."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for block in self.blocks:
            h = block(h)
        return next_token_loss(self.head(h), batch)


def batches(*sizes: int) -> list[Tensor]:
    """Token batches of ``sizes`` samples; of one size, so that a step is recorded once."""
    torch.manual_seed(7)
    return [tokens_of(size) for size in sizes or (3, 3)]
