"""Architectures whose values flow in unusual ways.

Length letters in comments: B samples, T tokens, D features, C channels, V words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from model_parts import VOCAB, WIDTH, Architecture, Block, Small, next_token_loss, tokens_of
from torch import Tensor, nn


class InPlaceEdits(Small):
    """Values are edited in place between units, and written into fresh memory."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.class_token = nn.Parameter(torch.randn(WIDTH))

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        h += self.positions
        tokens = torch.zeros(len(h), 7, WIDTH, dtype=h.dtype)
        tokens[:, 1:] = h
        tokens[:, 0] = self.class_token
        kept = []
        for block in self.blocks:
            tokens = block(tokens)
            tokens[:, 0].mul_(0.5)
            kept.append(tokens)
        tokens = torch.stack(kept).mean(0)
        return next_token_loss(self.head(tokens[:, 1:]), batch)


@dataclass
class Hidden:
    states: Tensor
    cache: None
    extra: dict[str, Any]
    depth: int = 0


class StructuredBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, hidden: Hidden, *, scale: float, mask: Tensor | None = None) -> Hidden:
        states = self.block(hidden.states) * scale
        if mask is not None:
            states = states * mask
        history = (*hidden.extra["history"], states.mean(1))
        return Hidden(states, None, {"history": history, "norm": states.norm()}, hidden.depth + 1)


class Structured(Small):
    """Dataclasses, dicts, tuples, None and numbers between units, given by keyword."""

    block = StructuredBlock

    def training_step(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        hidden = Hidden(self.embedding(input=tokens), None, {"history": ()})
        for block in self.blocks:
            hidden = block(hidden=hidden, scale=0.5 + hidden.depth / 4, mask=batch.get("mask"))
        assert hidden.depth == 4 and hidden.cache is None
        history = torch.stack(hidden.extra["history"])
        self.log("norm", hidden.extra["norm"])
        return next_token_loss(self.head(hidden.states), tokens) + 0.1 * history.pow(2).mean()


def masked_batch(count: int) -> dict[str, Tensor]:
    return {"tokens": tokens_of(count), "mask": (torch.rand(count, 6, 1) > 0.3).double()}


class Quantizer(nn.Module):
    """Nearest code of a book, straight through: returns integers, a boolean mask and floats."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        distance = (x.unsqueeze(-2) - self.book).pow(2).sum(-1)
        index = distance.argmin(-1)
        code = self.book[index]
        return x + (code - x).detach(), index, distance.min(-1).values > 1.0


class Quantized(Architecture):
    """Integer and boolean values cross stages without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block())
        self.quantizer = Quantizer()
        self.codes = nn.Embedding(5, WIDTH)
        self.decoder = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))

    def training_step(self, batch: Any) -> Tensor:
        x, _ = batch
        encoded = self.encoder(x)
        code, index, far = self.quantizer(encoded)
        out = self.decoder(code + self.codes(index) * far.unsqueeze(-1))
        self.log("used", torch.bincount(index, minlength=5).gt(0).sum())
        return F.mse_loss(out, x) + F.mse_loss(encoded, code.detach())


class DeepSupervision(Architecture):
    """Skips over several stages, a loss on several intermediate values, and their logs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(2))

    def training_step(self, batch: Any) -> Tensor:
        first = self.embedding(batch)
        h, values = first, []
        for block in self.blocks:
            h = block(h)
            values.append(h)
        loss = next_token_loss(self.heads[0](values[1]), batch) + next_token_loss(self.heads[1](h + first), batch)
        self.log("spread", values[2].std())
        self.log_everything(values)
        return loss + 1e-3 * sum(value.pow(2).mean() for value in values[3:5])

    def log_everything(self, values: list[Tensor]) -> None:
        self.log("first_mean", values[0].mean().detach())


class MaskedLoss(Small):
    """Values of another stage are picked by a boolean mask of the batch, in every form."""

    def training_step(self, batch: Any) -> Tensor:
        tokens, labels = batch["tokens"], batch["labels"]
        kept = labels != -100
        h = self.embedding(tokens)
        h = torch.where(kept.unsqueeze(-1), h, h.mean(1, keepdim=True))
        picked = h[kept]
        for block in self.blocks:
            h = block(h)
            picked = picked + h[kept]
        logits = self.head(h)
        self.log("masked", torch.masked_select(logits, kept.unsqueeze(-1)).mean())
        chosen = logits[labels >= 0, :]
        return F.cross_entropy(chosen, labels[kept]) + picked.pow(2).mean() * 1e-2


def labelled_batch(count: int) -> dict[str, Tensor]:
    tokens = tokens_of(count)
    labels = tokens.clone()
    labels[:, ::2] = -100
    labels[0, 1] = -100
    return {"tokens": tokens, "labels": labels}


class Aliased(Small):
    """Parameters that are held in a plain list as well, and used from there."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterDict(
            {"early": nn.Parameter(torch.ones(WIDTH)), "late": nn.Parameter(torch.ones(WIDTH))}
        )
        self.decayed = [block.down.weight for block in self.blocks]
        self.by_name = {"late": self.gains["late"]}

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch) * self.gains["early"]
        for block in self.blocks:
            h = block(h)
        penalty = sum(weight.pow(2).sum() for weight in self.decayed)
        return next_token_loss(self.head(h * self.by_name["late"]), batch) + 1e-3 * penalty
