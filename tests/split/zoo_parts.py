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
