"""FlexAttention in units: its masks are made in the step, or are in the batch, for all rows or with a row for each."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from parity_run import Layout
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import NotesLosses
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.utils.data import DataLoader

LENGTH, VOCAB, WIDTH, HEADS = 128, 20, 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return x + self.out(flex.flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2))


def mask_of(tokens: Tensor, of: str) -> Any:
    """Causal; of documents, which a 0 ends, so that it differs from row to row."""
    document = (tokens == 0).cumsum(1)

    def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[b, q] == document[b, k])

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    rows = len(tokens) if of == "documents" else None
    return flex.create_block_mask(within if rows else causal, rows, None, LENGTH, LENGTH, device="cpu")


class Packed(NotesLosses):
    lr = 0.5

    def __init__(self, of: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of = of
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, mask = batch
        h = self.embedding(tokens)
        mask = mask_of(tokens, self.of) if mask is None else mask
        for block in self.blocks:
            h = block(h, mask)
        return nn.functional.cross_entropy(self.head(h)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(layout: Layout | None, of: str, in_batch: bool = False, on_cpu: bool = True) -> list[float]:
    """In a worker. Torch refuses a backward of FlexAttention on CPUs, though its plain form has one."""
    tokens = torch.randint(0, VOCAB, (16, LENGTH), generator=torch.Generator().manual_seed(1))

    def collated(rows: list[Tensor]) -> Any:
        batch = torch.stack(rows)
        return batch, mask_of(batch, of) if in_batch else None

    where = (1, "auto") if layout is None else (layout.world_size, layout.strategy())
    module = Packed(of)
    with mock.patch.object(flex, "_validate_device", (lambda *_: None) if on_cpu else flex._validate_device):
        trainer(*where, precision="64-true").fit(module, DataLoader(list(tokens), batch_size=8, collate_fn=collated))
    return module.losses


LAYOUT = Layout("zb_h1", 2, num_microbatches=4)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("of", "in_batch"), [("documents", True), ("causal", True), ("documents", False), ("causal", False)]
)
def test_as_on_one_device(pool: WorkerPool, of: str, in_batch: bool) -> None:
    expected = pool.run(train, None, of, in_batch, world_size=1)[0]
    assert len(expected) == 2 and expected[1] < expected[0]
    for losses in pool.run(train, LAYOUT, of, in_batch, world_size=2, timeout=120):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_an_error_inside_a_unit_is_told_as_it_is(pool: WorkerPool) -> None:
    told = pool.refusals(None, train, LAYOUT, "causal", on_cpu=False, world_size=2, timeout=120)
    assert any("FlexAttention does not support backward on CPU" in text for text in told), told
    assert not any("outside the units" in text for text in told)
