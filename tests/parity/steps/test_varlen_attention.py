"""Blocks with torch's ``varlen_attn``: rows of packed documents, cut between documents, train as on one device.

Torch has its kernels for GPUs alone. On CPUs they are replaced by plain ones, with torch's own operations, formula of
autograd, fakes and count of FLOPs around them.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from feature_parts import assert_equal_trees
from one_device import placed
from parity_run import QUIET, Layout
from pool import WorkerPool
from small_models import NotesLosses
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.data import DataLoader
from varlen_kernels import varlen_on_cpus

from lightning_pp import PipelineParallelStrategy, split_packed

VOCAB, WIDTH, HEADS = 13, 64, 2
Row = dict[str, Any]


def row(lengths: tuple[int, ...]) -> Row:
    ids = torch.randint(0, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    labels = ids.index_fill(1, starts[:-1].long(), -100)  # the first token of a document follows on none
    return {"input_ids": ids, "labels": labels, "cu_seqlens": starts, "max_seqlen": max(lengths)}


ROWS = [row(lengths) for lengths in ((5, 3, 9, 2, 2, 7, 4), (4, 11, 6, 8), (8, 3, 7, 5))]


class Block(nn.Module):
    def __init__(self, is_packed: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_packed = is_packed

    def forward(self, h: Tensor, starts: Tensor, longest: int) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.qkv(self.norm(h)).chunk(3, -1))
        if self.is_packed:
            attended = varlen_attn(q[0], k[0], v[0], starts, starts, longest, longest, window_size=(-1, 0))[None]
        else:
            parts = [
                F.scaled_dot_product_attention(*(each[:, a:b].transpose(1, 2) for each in (q, k, v)), is_causal=True)
                for a, b in itertools.pairwise(starts.tolist())
            ]
            attended = torch.cat(parts, 2).transpose(1, 2)
        return h + self.out(attended.flatten(-2))


class Packed(NotesLosses):
    lr = 0.3

    def __init__(self, is_packed: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(is_packed) for _ in range(4))

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        h = self.embedding(batch["input_ids"])
        for block in self.blocks:
            h = block(h, batch["cu_seqlens"], batch["max_seqlen"])
        return F.cross_entropy(self.head(h)[0, :-1], batch["labels"][0, 1:])


def fit(layout: Layout | None, is_packed: bool, device: str = "cpu") -> tuple[Packed, pl.Trainer]:
    module = Packed(is_packed)
    split = {} if layout is None else {"strategy": layout.strategy(split_batch=split_packed)}
    where = {"devices": 1} if layout is None else placed(device, layout.world_size)
    options = {**QUIET, "accelerator": device, "precision": "64-true" if device == "cpu" else "bf16-true"}
    trainer = pl.Trainer(**{**options, **where}, max_epochs=3, use_distributed_sampler=False, **split)
    trainer.fit(module, DataLoader(ROWS, batch_size=None))
    return module, trainer


def train(layout: Layout | None, device: str) -> tuple[list[float], dict[str, Tensor], list[int], int]:
    """In a worker: losses, weights, FLOPs that the plan counts for each block, and calls of the CPU's backward."""
    with varlen_on_cpus() if device == "cpu" else nullcontext() as kernels:
        module, trainer = fit(layout, True, device)
    strategy, flops = trainer.strategy, []
    if isinstance(strategy, PipelineParallelStrategy):
        flops = [call.flops for call in strategy.engine.split.record.calls if call.unit.startswith("blocks")]
    weights = {name: p.detach().cpu().clone() for name, p in module.named_parameters() if not p.is_meta}
    return module.losses, weights, flops, 0 if kernels is None else kernels.num_backward


def flops_of_block(batch: Row) -> int:
    """Of the first part of ``batch``: its linear layers, and two products for each document and head."""
    starts = split_packed(batch, 3)[0].data["cu_seqlens"]
    linear = 2 * int(starts[-1]) * WIDTH * 4 * WIDTH
    return linear + sum(2 * 2 * length**2 * WIDTH for length in starts.diff().tolist())


@pytest.mark.parametrize(
    "schedule", ["zb_v", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("1f1b", "zb_h1"))]
)
def test_trains_as_attention_of_each_document_on_one_device(pool: WorkerPool, schedule: str) -> None:
    alone, _ = fit(None, False)
    ranks = pool.run(train, Layout(schedule, 2, 1, 3), "cpu", world_size=2, timeout=120)
    weights: dict[str, Tensor] = {}
    assert sum(num_backward for *_, num_backward in ranks) == 3 * len(ROWS) * 3 * 4  # epochs, rows, parts, blocks
    for losses, part, flops, _ in ranks:
        assert_equal_trees(losses, alone.losses)
        assert flops == [flops_of_block(ROWS[0])] * 4
        weights.update(part)
    assert_equal_trees(weights, {name: parameter.detach() for name, parameter in alone.named_parameters()})


@pytest.mark.gpu
def test_trains_with_torchs_own_kernels(pool: WorkerPool) -> None:
    ((expected, weights_alone, *_),) = pool.run(train, None, "cuda", world_size=1)
    for losses, weights, *_ in pool.run(train, Layout("zb_h1", 2, 1, 3), "cuda", world_size=2, timeout=240):
        assert losses == pytest.approx(expected, rel=2e-2)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, weights_alone[name], rtol=2e-2, atol=2e-2)
