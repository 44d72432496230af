"""Batches whose shapes change train as on one device, and their steps are recorded a few times only."""

from __future__ import annotations

import logging
import re
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from feature_parts import assert_equal_trees
from parity_run import QUIET, Layout, whole_weights
from pool import WorkerPool
from small_models import Descends
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_pp import BatchPart, split_packed
from lightning_pp.planning.steps import plans

WIDTH, VOCAB, FEATURES = 8, 11, 5
LONG = 16
# around LONG, each other than the last
LENGTHS = (9, 14, 21, 12, 30)
RECORDINGS: list[int] = []


def counting_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    original = plans.dry_run

    def dry_run(*args: Any, **kwargs: Any) -> Any:
        RECORDINGS.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(plans, "dry_run", dry_run)


class Block(nn.Module):
    """Attention between the tokens of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, scale: float = 1.0, sizes: list[int] | None = None) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        if sizes is None:
            return h + scale * self.out(F.scaled_dot_product_attention(q, k, v))
        parts = [
            F.scaled_dot_product_attention(*each) for each in zip(*(x.split(sizes, 1) for x in (q, k, v)), strict=True)
        ]
        return h + self.out(torch.cat(parts, 1))


class Pooling(nn.Module):
    """Long rows lose every other token in training."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.mix(h[:, ::2] if h.shape[1] > LONG and self.training else h).relu()


class Module(Descends):
    lr = 0.2

    losses: list[float]
    recordings: list[int]  # in each batch

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.losses, self.recordings = [], []
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.recordings.append(len(RECORDINGS))
        RECORDINGS.clear()


class Padded(Module):
    """Rows that are padded to the longest of the batch; sizes are read as numbers."""

    def make(self) -> None:
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def hidden(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h, 1 / int(ids.shape[1]))
        return h

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(ids)).flatten(0, 1), ids.flatten(), ignore_index=0)

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(ids, batch_idx), batch_size=1)

    @staticmethod
    def batches() -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(1, VOCAB, (4, length), generator=generator) for length in LENGTHS]
        for row in rows:
            row[1, -3:] = row[2, -5:] = 0
        return rows


class Branching(Padded):
    """Whose long batches take a block more, and lose tokens inside a unit."""

    def make(self) -> None:
        super().make()
        self.pooling = Pooling()

    def hidden(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks[: 2 if ids.shape[1] <= LONG else 4]:
            h = block(h)
        return h[:, :1] + self.pooling(h)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(ids).mean(1)), ids[:, 0])


class PerMicrobatch(Padded):
    """Each microbatch is cut to its own longest row."""

    @staticmethod
    def split(ids: Tensor, num_microbatches: int) -> list[BatchPart]:
        parts = [part[:, : int((part != 0).sum(1).max())] for part in ids.tensor_split(min(num_microbatches, len(ids)))]
        return [BatchPart(part, int((part != 0).sum())) for part in parts]

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        h = self.embedding(ids) * (ids != 0).unsqueeze(-1)
        for block in self.blocks:
            h = h + torch.tanh(block.out(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten(), ignore_index=0)

    @staticmethod
    def batches() -> list[Any]:
        rows = Padded.batches()
        for number, row in enumerate(rows):
            row[2:, -2 - number % 3 :] = 0
        return rows


class Documents(Module):
    """A row of documents with their boundaries, cut between documents."""

    def make(self) -> None:
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.embedding(batch["input_ids"])
        for block in self.blocks:
            h = block(h, sizes=batch["cu_seqlens"].diff().tolist())
        return F.cross_entropy(self.head(h)[0, :-1], batch["labels"][0, 1:])

    @staticmethod
    def batches() -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for number in LENGTHS:
            sizes = torch.randint(2, 9, (3 + number % 4,), generator=generator)
            offsets = F.pad(sizes.cumsum(0), (1, 0))
            ids = torch.randint(0, VOCAB, (1, int(offsets[-1])), generator=generator)
            labels = ids.clone()
            labels[0, offsets[:-1]] = -100
            made.append({"input_ids": ids, "labels": labels, "cu_seqlens": offsets.int()})
        return made


class Speech(Module):
    """Recurrent layers on packed sequences, and a CTC loss."""

    recurrent: type[nn.RNNBase] = nn.LSTM

    def make(self) -> None:
        self.front = nn.Linear(FEATURES, WIDTH)
        self.first = self.recurrent(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.second = self.recurrent(2 * WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        lengths, targets = batch["lengths"], batch["targets"]
        packed = pack_padded_sequence(self.front(batch["x"]), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.second(self.first(packed)[0])[0], batch_first=True)
        scores = self.head(h).log_softmax(-1).transpose(0, 1)
        losses = F.ctc_loss(scores, targets, lengths, (targets != 0).sum(1), reduction="none")
        return losses.mean()

    @staticmethod
    def batches() -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for longest in LENGTHS:
            lengths = torch.randint(longest // 2 + 1, longest + 1, (4,), generator=generator)
            x = torch.randn(4, longest, FEATURES, generator=generator)
            targets = torch.randint(1, VOCAB, (4, 2), generator=generator)
            made.append({"x": x, "lengths": lengths, "targets": targets})
        return made


class SpeechByGru(Speech):
    recurrent = nn.GRU


def train(kind: type[Module], layout: Layout | None) -> tuple[Any, ...]:
    """Losses, logged values, weights; how often a step was recorded after the first batch, and what is told of it."""
    module, told = kind(), Told()
    splits = {Documents: split_packed, PerMicrobatch: PerMicrobatch.split}
    where: dict[str, Any] = {"devices": 1}
    RECORDINGS.clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if layout is not None:
            counting_recordings(monkeypatch)
            split = {"split_batch": splits[kind]} if kind in splits else {}
            strategy = layout.strategy(**split, check_first_batches=kind in (Padded, PerMicrobatch))
            where = {"devices": layout.world_size, "strategy": strategy}
        trainer = L.Trainer(**{**QUIET, **where}, max_epochs=1, precision="64-true", use_distributed_sampler=False)
        batches = kind.batches()
        loader = DataLoader([_double(batch) for batch in batches], batch_size=None)
        monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "handlers", [told])
        trainer.fit(module, loader, loader if validates(kind) else None)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.losses, logged, whole_weights(module), sum(module.recordings[1:]), told.texts


class Told(logging.Handler):
    """What is logged of recordings."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts += [record.getMessage()] * ("recorded" in record.getMessage())


def validates(kind: type[Module]) -> bool:
    return issubclass(kind, Padded) and not issubclass(kind, Looping)


def _double(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _double(value) for name, value in batch.items()}
    return batch.double() if batch.is_floating_point() else batch


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        (Padded, "1f1b"),
        (Branching, "zb_h1"),
        (PerMicrobatch, "1f1b"),
        (Documents, "zb_v"),
        (Speech, "zb_h1"),
        *(
            pytest.param(kind, schedule, marks=pytest.mark.nightly)
            for kind, schedule in (
                (SpeechByGru, "1f1b"),
                (Padded, "zb_v"),
                (Branching, "zb_v"),
                (Documents, "zb_h1"),
                (Speech, "1f1b"),
            )
        ),
    ],
)
def test_trains_as_on_one_device(pool: WorkerPool, kind: type[Module], schedule: str) -> None:
    *expected, expected_weights, _, _ = train(kind, None)
    weights: dict[str, Tensor] = {}
    for *found, part, num_recordings, told in pool.run(
        train, kind, Layout(schedule, 2, 1, 2), world_size=2, timeout=120
    ):
        assert_equal_trees(found, expected)
        weights.update(part)
        assert num_recordings == (kind is Branching) and not told  # whose long batches call other units
    assert_equal_trees(weights, expected_weights)


class Shortening(nn.Module):
    """From some time on, loses a token where there are data."""

    is_on = False

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.mix(h)[:, 1:] if type(self).is_on and type(h) is Tensor else self.mix(h)


class Departing(Padded):
    def make(self) -> None:
        super().make()
        self.blocks[1] = Shortening()

    def hidden(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h)
        return h

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Shortening.is_on = batch_idx == 4


def test_another_size_than_foreseen_is_an_error_on_all_ranks(pool: WorkerPool) -> None:
    report = pool.run(train, Departing, Layout("1f1b", 2, 1, 2), world_size=2, timeout=60, expect_failure=True)
    messages = [str(failure) for failure in report.failures]
    assert len(messages) == 2 and report.seconds < 50
    for message in messages:
        assert "unit 'blocks.1' has shape (2, 29, 8)" in message and "(2, 30, 8)" in message, message


class Looping(Padded):
    """Runs other code between units for each length of a row."""

    def hidden(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for place in range(5):
            h = 0.5 * h if ids.shape[1] >> place & 1 else h + 0.1
        return self.blocks[0](h)

    @staticmethod
    def batches() -> list[Any]:
        return [torch.ones(4, length, dtype=torch.long) for length in range(3, 25)]


def test_recordings_that_go_on_are_told_once(pool: WorkerPool) -> None:
    losses, *_ = train(Looping, None)
    (found, *_, told), (other, *_) = pool.run(train, Looping, Layout("1f1b", 2, 1, 2), world_size=2, timeout=120)
    assert_equal_trees([found, other], [losses, losses])
    [message] = told
    assert re.search(r"last 20 batches training_step was recorded \d\d times\. This took [\d.]+ s, \d+% of", message)
    assert re.search(r"Before the last recording batch went from shape \(2, 2\d\) to shape \(2, 2\d\)\.", message)
