"""Two encoders of bytes, trained so that the two halves of a text find each other among all halves of the batch.

Shape letters: B texts, T bytes per half, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pp.recipes.byte_gpt import NUM_BYTE_VALUES, Block
from lightning_pp.recipes.optimization import RecipeModule


class Tower(nn.Module):
    """Bytes to one vector.

    Args:
        num_layers: Transformer blocks.
        dim: Width D.
        num_heads: Attention heads; divides ``dim``.
        max_seq_len: Longest text T.
    """

    def __init__(self, num_layers: int, dim: int, num_heads: int, max_seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTE_VALUES, dim)
        self.position = nn.Embedding(max_seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, text: Tensor) -> Tensor:
        """Byte values [B, T] to vectors of length one [B, D]."""
        x = self.embedding(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.norm(x).mean(dim=1), dim=-1)


class TwoTower(RecipeModule):
    """Contrastive training of two towers: each first half is to be most similar to its own second half.

    The loss compares all texts of a batch, so it is that of the whole batch only with the strategy's
    ``whole_batch_loss``. Batches are ``{"input_ids": int64 [B, 2 T]}``.

    Args:
        num_layers: Transformer blocks of each tower.
        dim: Width D.
        num_heads: Attention heads; divides ``dim``.
        max_seq_len: Longest half T of a text.
        temperature: Divisor of the similarities.
        learning_rate: Peak of a cosine schedule after the warm-up.
        num_warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Decay of the matrices.
        optimizer: Function that makes the optimizer from parameter groups and ``lr``. None: AdamW.
    """

    def __init__(
        self,
        num_layers: int = 4,
        dim: int = 128,
        num_heads: int = 4,
        max_seq_len: int = 64,
        temperature: float = 0.05,
        learning_rate: float = 1e-3,
        num_warmup_steps: int = 20,
        weight_decay: float = 0.1,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__(learning_rate, num_warmup_steps, weight_decay, optimizer)
        self.save_hyperparameters(ignore=["optimizer"])
        self.first = Tower(num_layers, dim, num_heads, max_seq_len)
        self.second = Tower(num_layers, dim, num_heads, max_seq_len)
        self.temperature = temperature

    def _similarities(self, batch: dict[str, Tensor]) -> Tensor:
        """Of each first half with each second half, over the temperature, [B, B]."""
        first, second = batch["input_ids"].chunk(2, dim=1)
        similarities: Tensor = self.first(first) @ self.second(second).T / self.temperature
        return similarities

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean cross-entropy of finding the other half, in nats; log(B) by guessing."""
        similarities = self._similarities(batch)
        own = torch.arange(len(similarities), device=similarities.device)
        return (F.cross_entropy(similarities, own) + F.cross_entropy(similarities.T, own)) / 2
