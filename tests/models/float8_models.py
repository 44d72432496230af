"""A small model of torchao's float8 linears, emulated on CPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def float8_config(recipe: str, **changes: Any) -> Float8LinearConfig:
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **changes)


class Float8Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Float8GPT(pl.LightningModule):
    """Three blocks whose linears become torchao's in ``configure_model``, as its users do it."""

    def __init__(self, recipe: str = "tensorwise", width: int = 32, **changes: Any) -> None:
        super().__init__()
        self.recipe, self.changes = recipe, changes
        self.embedding = nn.Embedding(48, width)
        self.blocks = nn.ModuleList([Float8Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 48)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        convert_to_float8_training(self.blocks, config=float8_config(self.recipe, **self.changes))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def token_batches(num_samples: int = 8, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(torch.randint(0, 48, (num_samples, 9), generator=generator), batch_size=batch_size)  # type: ignore[arg-type]
