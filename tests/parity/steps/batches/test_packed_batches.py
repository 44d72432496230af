"""Rows of packed documents, cut between documents, train as on one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from feature_parts import check_with_weights, make_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import NotesLosses
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorWithFlattening

from lightning_pp import split_packed
from lightning_pp.errors import BatchError

VOCAB, WIDTH = 13, 8


def documents(lengths: tuple[int, ...], without_labels: tuple[int, ...] = ()) -> list[dict[str, list[int]]]:
    """Documents of these lengths; some labels are ignored, and all of those ``without_labels``."""
    generator = torch.Generator().manual_seed(sum(lengths))
    made = []
    for index, length in enumerate(lengths):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        ignored = torch.rand(length, generator=generator) < (1 if index in without_labels else 0.3)
        made.append({"input_ids": ids.tolist(), "labels": torch.where(ignored, -100, ids).tolist()})
    return made


def row(lengths: tuple[int, ...], without_labels: tuple[int, ...] = (), of: str = "positions") -> Any:
    batch: dict[str, Any] = DataCollatorWithFlattening()(documents(lengths, without_labels))
    if of == "offsets":
        batch["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        batch["max_seqlen"] = max(lengths)
    return batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        if offsets is None:
            return h + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        parts = [
            F.scaled_dot_product_attention(q[:, start:end], k[:, start:end], v[:, start:end], is_causal=True)
            for start, end in itertools.pairwise(offsets.tolist())
        ]
        return h + self.out(torch.cat(parts, 1))


class Packed(NotesLosses):
    """Masks attention by position ids that restart, or attends by ``cu_seqlens``; the loss is torch's."""

    lr = 0.3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, batch: Any) -> Tensor:
        h = self.embedding(batch["input_ids"]) + self.positions(batch["position_ids"])
        offsets, mask = batch.get("cu_seqlens"), None
        if offsets is None:
            document = (batch["position_ids"] == 0).cumsum(1)
            mask = (document.unsqueeze(-1) == document.unsqueeze(-2)).tril()
        for block in self.blocks:
            h = block(h, mask, offsets)
        return self.head(h)

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch)
        return F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=1)


class ByHand(Packed):
    """A mean over labels that counts them itself."""

    def loss(self, batch: Any) -> Tensor:
        labels = batch["labels"][0, 1:]
        counts = labels != -100
        losses = F.cross_entropy(self(batch)[0, :-1], labels.clamp(min=0), reduction="none")
        return (losses * counts).sum() / counts.sum()


def train(layout: Layout | None, kind: type[Packed], of: str = "positions") -> tuple[Any, ...]:
    module = kind()
    where = {} if layout is None else {"strategy": layout.strategy(split_batch=split_packed)}
    trainer = make_trainer(layout, **where)
    # the second row has as many documents as microbatches, and the third a document without labels
    rows = [row((5, 3, 9, 2, 2, 7, 4), of=of), row((4, 11, 6), of=of), row((8, 3, 7, 5), (0,), of=of)]
    trainer.fit(module, DataLoader(rows, batch_size=None), DataLoader(rows[::-1], batch_size=None))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.losses, logged, whole_weights(module)


@pytest.mark.parametrize(
    ("kind", "layout", "of"),
    [
        pytest.param(Packed, Layout("1f1b", 2, 1, 3), "positions", marks=pytest.mark.nightly),
        (Packed, Layout("zb_h1", 2, 1, 3), "offsets"),
        pytest.param(ByHand, Layout("1f1b", 2, 1, 2), "positions", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_trains_as_on_one_device(pool: WorkerPool, kind: type[Packed], layout: Layout, of: str) -> None:
    check_with_weights(pool, train, layout, kind, of)


@pytest.mark.parametrize("of", ["positions", "offsets"])
@pytest.mark.parametrize("lengths", [(5, 3, 9, 2, 2, 7, 4), (1, 1, 1, 30, 1, 1), (6, 6, 6, 6), (2, 9, 2)])
def test_parts_are_as_equal_as_documents_allow(of: str, lengths: tuple[int, ...]) -> None:
    batch = row(lengths, of=of)
    for number in (2, 3):
        parts = split_packed(batch, number)
        sizes = [part.data["input_ids"].shape[1] for part in parts]
        every_way = [
            [sum(lengths[start:end]) for start, end in itertools.pairwise((0, *cuts, len(lengths)))]
            for cuts in itertools.combinations(range(1, len(lengths)), number - 1)
        ]
        assert len(parts) == number and sizes in every_way
        assert sum(size**2 for size in sizes) == min(sum(size**2 for size in way) for way in every_way)
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(torch.cat([part.data[name] for part in parts], 1), batch[name])
        first = 0
        for part in parts:
            assert part.num_samples == max(1, int((part.data["labels"] != -100).sum()))
            assert int(part.data["position_ids"][0, 0]) == 0
            if of == "offsets":
                offsets = part.data["cu_seqlens"]
                own = lengths[first : first + len(offsets) - 1]
                assert offsets.dtype is torch.int32 and offsets.tolist() == [0, *itertools.accumulate(own)]
                assert part.data["max_seqlen"] == max(own)
                first += len(own)


def test_other_entries_of_a_row() -> None:
    collated = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents((3, 5, 2, 4)))
    weights = torch.randn(14, 2)
    batch = BatchEncoding({**collated, "deep": [weights], "class_weights": torch.ones(VOCAB), "name": "a"})
    first, second = split_packed(batch, 2)
    assert type(first.data) is BatchEncoding and batch["input_ids"].shape == (1, 14)
    assert first.data["cu_seq_lens_k"].tolist() == [0, 3, 8] and first.data["max_length_q"] == 5
    assert second.data["cu_seq_lens_q"].tolist() == [0, 2, 6] and second.data["max_length_k"] == 4
    assert torch.equal(torch.cat([first.data["deep"][0], second.data["deep"][0]]), weights)
    assert second.data["class_weights"] is batch["class_weights"] and second.data["name"] == "a"
    del batch["labels"]
    assert [part.num_samples for part in split_packed(batch, 2)] == [8, 6]
    assert split_packed(batch, 1)[0].data is batch
    padded = {**batch, "cu_seq_lens_q": torch.tensor([0, 3, 14, 14]), "cu_seq_lens_k": torch.tensor([0, 3, 14, 14])}
    assert [part.data["cu_seq_lens_q"].tolist() for part in split_packed(padded, 2)] == [[0, 3], [0, 11]]


def test_rows_that_cannot_be_cut() -> None:
    batch = row((3, 5, 2), of="offsets")
    without = {name: batch[name] for name in ("input_ids", "labels")}
    ids, offsets = batch["input_ids"], batch["cu_seqlens"]
    for bad, text in (
        (batch, r"row of 10 tokens has 3 documents, but num_microbatches is 4.* Pack at least 4 .* num_microbatches=3"),
        (without, r"neither 'cu_seqlens' nor 'position_ids' of shape \(1, 10\), but .*'labels': \(1, 10\)"),
        ({**without, "position_ids": torch.arange(4, 14)[None]}, r"'position_ids' of the batch begin with 4"),
        ({**batch, "cu_seqlens": offsets[:-1]}, r"'cu_seqlens' of the batch runs from 0 to 8\. .* rise from 0 to 10"),
        ({**batch, "cu_seqlens": [0, 3, 10]}, r"'cu_seqlens' of the batch is \[0, 3, 10\]\. It must be a tensor"),
        ({**batch, "cu_seq_lens_q": torch.tensor([0, 4, 10])}, r"'cu_seqlens' and 'cu_seq_lens_q' of the batch differ"),
        ({**batch, "input_ids": ids.view(2, 5)}, r"of type dict, and its 'input_ids' have shape \(2, 5\)"),
        ([ids], r"type list and has no such tensor"),
    ):
        with pytest.raises(BatchError, match=text):
            split_packed(bad, 4)
    with pytest.raises(BatchError, match=r"'mask' of the batch has shape \(1, 10, 10\), in which several dimensions"):
        split_packed({**batch, "mask": torch.ones(1, 10, 10)}, 2)


def test_too_few_documents_end_the_run_before_an_update(pool: WorkerPool) -> None:
    report = pool.run(train, Layout("1f1b", 2, 1, 4), Packed, world_size=2, timeout=60, expect_failure=True)
    assert all(failure is not None and failure.type == "BatchError" for failure in report.failures)
    assert all("has 3 documents, but num_microbatches is 4" in each.message for each in report.failures if each)
