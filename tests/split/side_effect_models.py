"""A small language model whose steps pass values by unusual ways; tests subclass it."""

from __future__ import annotations

from typing import Any

import torch
from one_process import Architecture
from torch import Tensor, nn
from zoo_parts import VOCAB, WIDTH, Block, next_token_loss, tokens_of


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
    """Token batches of ``sizes`` samples."""
    torch.manual_seed(7)
    return [tokens_of(size) for size in sizes or (3, 2)]
