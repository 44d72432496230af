"""Results of the code between units cross where they are less than the outputs of units that they were made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from model_parts import VOCAB, WIDTH, Architecture, Attention, next_token_loss
from one_process import OneProcessPipeline, compare
from torch import Tensor, nn

NUM_LAYERS, LENGTH = 6, 5
Mix = Callable[["Residual", Tensor, int], Tensor]


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Residual(Architecture):
    """Layers of attention and a feed-forward part that ``mix`` puts together, outside of them or in one block."""

    def __init__(self, mix: Mix, inside: bool = False) -> None:
        super().__init__()
        self.mix = mix
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.scales = nn.Parameter(1 + torch.randn(NUM_LAYERS, WIDTH) / 4)
        self.attention = nn.ModuleList(Attention() for _ in range(NUM_LAYERS))
        self.mlp = nn.ModuleList(feed_forward() for _ in range(NUM_LAYERS))
        self.blocks = nn.ModuleList(Whole(self, index) for index in range(NUM_LAYERS)) if inside else None

    def training_step(self, batch: Tensor) -> Tensor:
        h = self.embedding(batch)
        for index in range(NUM_LAYERS):
            h = self.mix(self, h, index) if self.blocks is None else self.blocks[index](h)
        return next_token_loss(self.head(h), batch)


class Whole(nn.Module):
    """One layer of ``model``, as a unit."""

    def __init__(self, model: Residual, index: int) -> None:
        super().__init__()
        self.attention, self.mlp = nn.ModuleList([model.attention[index]]), nn.ModuleList([model.mlp[index]])
        self.mix = model.mix

    def forward(self, h: Tensor) -> Tensor:
        return self.mix(self, h, 0)  # type: ignore[arg-type]


def plain(model: Residual, h: Tensor, index: int) -> Tensor:
    h = h + model.attention[index](h)
    return h + model.mlp[index](h)


def with_more_between(model: Residual, h: Tensor, index: int) -> Tensor:
    """Views, several outputs, a cast and functions of several tensors on the way, and a sum that is made twice."""
    a = model.attention[index](F.layer_norm(h, (WIDTH,)))
    first, second = a.chunk(2, dim=-1)
    h = torch.cat([second, first], dim=-1).contiguous() + h
    h = h.flatten(0, 1).view(h.shape)
    h = h * 0.5 + h * 0.5
    return torch.add(h, model.mlp[index](h).double())


def with_parameters(model: Residual, h: Tensor, index: int) -> Tensor:
    if index == 0:
        h = h + model.positions
    h = h + model.attention[index](h) * model.scales[index]
    return h + F.linear(model.mlp[index](h), torch.diag(model.scales[index]))


def with_edits(model: Residual, h: Tensor, index: int) -> Tensor:
    h = h + model.attention[index](h)
    g = h * 2
    g += 1  # what it was is nowhere to be had
    h = h + model.mlp[index](g)
    h.mul_(0.5)
    return h + g


def with_units_that_edit(model: Residual, h: Tensor, index: int) -> Tensor:
    h = h + model.attention[index](h)
    return h.clone() + model.mlp[index](F.relu_(h * 1.5))


def with_checkpoints(model: Residual, h: Tensor, index: int) -> Tensor:
    def half(x: Tensor) -> Tensor:
        return x * 0.5 + model.attention[index](x)

    h = h + torch.utils.checkpoint.checkpoint(half, h, use_reentrant=False)
    return h + model.mlp[index](h)


def without_gradients(model: Residual, h: Tensor, index: int) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(h + model.attention[index](h))
    return h + gate * model.mlp[index](h)


def with_dropout(model: Residual, h: Tensor, index: int) -> Tensor:
    h = h + F.dropout(model.attention[index](h), 0.5)
    return h + model.mlp[index](h)


MIXES = [
    plain, with_more_between, with_parameters, with_edits, with_units_that_edit, with_checkpoints, without_gradients,
]  # fmt: skip


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, VOCAB, (rows, LENGTH)) for rows in (3, 2)]


def sent_bytes(pipeline: OneProcessPipeline) -> int:
    (plan, *_) = pipeline.plans(batches()[0])
    return sum(edge.spec.num_bytes for edge in plan.edges)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.__name__)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_training_equals_the_whole_model(mix: Mix, num_stages: int) -> None:
    pipeline, _ = compare(lambda: Residual(mix), batches(), num_stages, splits_backward=num_stages == 3)
    (plan, *_) = pipeline.plans(batches()[0])
    one = 3 * LENGTH * WIDTH * 8
    print(mix.__name__, num_stages, sent_bytes(pipeline) / one, len(plan.edges), plan.crossing_operations)
