"""Architectures of language models, tiny, in plain torch; none of them knows of pipelines.

Length letters in comments: B samples, T tokens, D features, C channels, V words.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from model_parts import VOCAB, WIDTH, Architecture, Attention, Block, Small, StateSpaceLayer, next_token_loss, tokens_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class EncoderDecoder(Architecture):
    """torch's own Transformer, with masks, around embeddings of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCAB, WIDTH)
        self.target = nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 3, 3, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        source, target = batch["source"], batch["target"]
        mask = self.transformer.generate_square_subsequent_mask(target.shape[1]).double()
        padding = source == 0
        hidden = self.transformer(
            self.source(source), self.target(target), tgt_mask=mask, src_key_padding_mask=padding.double() * -1e9
        )
        return next_token_loss(self.head(hidden), target)

    def validation_step(self, batch: Any) -> Tensor:
        source, target = batch["source"], batch["target"]
        padding = source == 0
        hidden = self.transformer(
            self.source(source), self.target(target), src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        return self.head(hidden)


def translation_batch(count: int) -> dict[str, Tensor]:
    source = tokens_of(count, 7)
    source[:, 5:] = 0
    return {"source": source, "target": tokens_of(count, 5)}


class RoutedExperts(nn.Module):
    """Top-2 of three experts, each on the tokens that chose it: what runs inside depends on data."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        probabilities = self.router(flat).softmax(-1)
        chosen_weights, chosen = probabilities.topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * chosen_weights[token, place, None])
        load = torch.bincount(chosen.flatten(), minlength=3)
        balance = (probabilities.mean(0) * load / load.sum()).sum() * 3
        return out.view_as(x), balance


class MixtureOfExperts(Small):
    block = RoutedExperts

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        balances = []
        for block in self.blocks:
            change, balance = block(h)
            h = h + change
            balances.append(balance)
        balance = torch.stack(balances).mean()
        self.log("balance", balance)
        return next_token_loss(self.head(h), batch) + 0.01 * balance


class StateSpace(Small):
    """A gated linear recurrence over time, in every layer."""

    block = StateSpaceLayer


class Recurrent(Architecture):
    """LSTM and GRU layers, whose weights torch keeps in a list besides, and a state handed from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.recurrent = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.last = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        h, state = self.embedding(batch), None
        for layer in self.recurrent:
            h, state = layer(h, state)
        h, _ = self.last(h, state[0])
        return next_token_loss(self.head(h), batch)


class SharedBlock(Architecture):
    """ALBERT: one block, called many times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for _ in range(5):
            h = self.block(h)
        return next_token_loss(self.head(self.norm(h)), batch)


class SharedInList(Architecture):
    """A list in which the same block stands several times, under several names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        shared = Block()
        self.layers = nn.ModuleList([Block(), shared, shared, Block()])
        self.alias = shared
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for layer in self.layers:
            h = layer(h)
        return next_token_loss(self.head(h), batch)


class SeparateLists(Architecture):
    """Norms, attention and MLPs in lists of their own; the residuals are outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attentions = nn.ModuleList(Attention() for _ in range(3))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            h = h + attention(norm(h))
            h = h + mlp(h)
        return next_token_loss(self.head(h), batch)


class TiedByHand(Architecture):
    """The embedding's weight is the head's: read outside the embedding, at the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for block in self.blocks:
            h = block(h)
        return next_token_loss(F.linear(h, self.embedding.weight, self.bias), batch)


class TiedModules(Small):
    """Two modules share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight


class Checkpointed(Small):
    """Blocks that are run again in backward."""

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return next_token_loss(self.head(h), batch)


class FrozenTrunk(Small):
    """A frozen trunk under trained adapters: gradients flow through frozen units."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            h = block(h) + adapter(h)
        return next_token_loss(self.head(h), batch)
