"""A model with residuals inside or outside of its units, and what the stages really send in one batch of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from parity_run import QUIET
from small_models import Descends
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.runtime.transport.sends import Send, Sends

WIDTH, LENGTH, WORDS, NUM_LAYERS = 256, 8, 16, 8


class Half(nn.Module):
    """Half a layer: attention would be one, an MLP the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(h)))


class Layer(nn.Module):
    """Two halves with their residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Half(), Half()

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(h)
        return h + self.mlp(h)


class Layers(Descends):
    """Eight layers; ``outside``: their halves are units, added up by the step."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.outside = outside
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        if outside:
            self.attention = nn.ModuleList(Half() for _ in range(NUM_LAYERS))
            self.mlp = nn.ModuleList(Half() for _ in range(NUM_LAYERS))
        else:
            self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.embedding(batch[0])
        if self.outside:
            for attention, mlp in zip(self.attention, self.mlp, strict=True):
                h = h + attention(h)
                h = h + mlp(h)
        else:
            for layer in self.layers:
                h = layer(h)
        return self.head(h).square().mean()


def bytes_sent(
    outside: bool, num_microbatches: int, split_points: Sequence[str] | None = None, schedule: str = "zb_h1"
) -> tuple[int, int]:
    """In a worker: bytes that this rank's transport sends in one batch, and bytes that its plan says, of all ranks."""
    sent = 0
    add = Sends.add

    def counting(self: Sends, receiver: int, send: Send) -> None:
        nonlocal sent
        if send.tensor is not None:
            sent += send.tensor.nbytes
        add(self, receiver, send)

    Sends.add = counting  # type: ignore[method-assign]
    try:
        strategy = PipelineParallelStrategy(
            4,
            num_microbatches=num_microbatches,
            schedule=schedule,
            split_points=split_points,
            check_first_batches=False,
        )
        trainer = L.Trainer(**QUIET, devices=4, strategy=strategy, max_epochs=1)
        trainer.fit(Layers(outside), DataLoader(TensorDataset(torch.zeros(4, LENGTH, dtype=torch.long)), batch_size=4))
        plan = strategy.engine.split.step_plan()
    finally:
        Sends.add = add  # type: ignore[method-assign]
    planned = sum(edge.spec.num_bytes * (1 + edge.has_gradient) for edge in plan.edges)
    return sent, planned
