"""What it costs a pipeline of two CPU processes that shapes change from batch to batch, beside one device.

A new shape of a microbatch is recorded by a dry run. Each model is trained for some batches on one device, as a
pipeline on batches of one shape, and as a pipeline on batches whose shapes all differ; all in one run of this script.

``ctc``     a BiLSTM on packed sequences (``pack_padded_sequence``), and a CTC loss
``padded``  the same on sequences that are padded to the longest of the batch
``varlen``  a transformer on rows of packed documents with ``cu_seqlens``, cut by ``split_batch=split_packed``

    python benchmarks/costs/changing_shapes.py
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_pp import PipelineParallelStrategy, split_packed

MOST_TIMES_FIXED = 1.5
NUM_BATCHES = {"ctc": 18, "padded": 18, "varlen": 8}
_CLASSES, _FEATURES, _WIDTH = 30, 40, 128
_VOCABULARY, _TEXT_WIDTH = 500, 384


class Speech(pl.LightningModule):
    """Two bidirectional LSTMs, and a CTC loss on what they say of each frame."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.packs = packs
        self.front = nn.Sequential(nn.Linear(_FEATURES, _WIDTH), nn.ReLU())
        self.first = nn.LSTM(_WIDTH, _WIDTH, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * _WIDTH, _WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * _WIDTH, _CLASSES)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        """CTC loss."""
        hidden: Any = self.front(batch["frames"])
        lengths = batch["lengths"].cpu()
        if self.packs:
            hidden = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.first(hidden)
        hidden, _ = self.second(hidden)
        if self.packs:
            hidden, _ = pad_packed_sequence(hidden, batch_first=True)
        scores = self.head(hidden).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch["targets"], lengths, batch["target_lengths"], zero_infinity=True)

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Block(nn.Module):
    """Attention within documents, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(_TEXT_WIDTH), nn.LayerNorm(_TEXT_WIDTH)
        self.qkv, self.out = nn.Linear(_TEXT_WIDTH, 3 * _TEXT_WIDTH), nn.Linear(_TEXT_WIDTH, _TEXT_WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(_TEXT_WIDTH, 4 * _TEXT_WIDTH), nn.GELU(), nn.Linear(4 * _TEXT_WIDTH, _TEXT_WIDTH)
        )

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Attention document by document."""
        qkv = self.qkv(self.norm(hidden)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        sizes = cu_seqlens.diff().tolist()
        parts = [part.split(sizes, dim=-2) for part in qkv]
        documents = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in zip(*parts, strict=True)]
        attended = torch.cat(documents, dim=-2).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(attended)
        widened: Tensor = self.mlp(self.norm2(hidden))
        return hidden + widened


class PackedText(pl.LightningModule):
    """A small GPT on packed documents."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _TEXT_WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(_TEXT_WIDTH, _VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        """Next-token loss."""
        hidden = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden, batch["cu_seqlens"])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Batches(Dataset[Any]):
    """Whole batches, each with a shape of its own, or all with that of the longest."""

    def __init__(self, model: str, num_batches: int, changing: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        make = _text if model == "varlen" else _speech
        sizes = torch.randperm(num_batches, generator=generator).tolist()
        self.batches = [make(size if changing else num_batches // 2, generator, changing) for size in sizes]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def _speech(size: int, generator: torch.Generator, changing: bool) -> dict[str, Tensor]:
    longest = 60 + 5 * size
    lengths = torch.randint(longest // 2, longest + 1, (16,), generator=generator)
    if not changing:
        lengths = torch.linspace(longest // 2, longest, 4).long().repeat(4)
    lengths[0] = longest
    target_lengths = torch.randint(8, 13, (16,), generator=generator)
    targets = torch.randint(1, _CLASSES, (16, 12), generator=generator)
    frames = torch.randn(16, longest, _FEATURES, generator=generator)
    return {"frames": frames, "lengths": lengths, "targets": targets, "target_lengths": target_lengths}


def _text(size: int, generator: torch.Generator, changing: bool) -> dict[str, Tensor]:
    sizes = torch.randint(40, 120, (16 + size,), generator=generator) if changing else torch.full((20,), 80)
    offsets = nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    ids = torch.randint(0, _VOCABULARY, (1, int(offsets[-1])), generator=generator)
    labels = ids.roll(-1)
    labels[0, (offsets[1:] - 1).long()] = -100
    return {"input_ids": ids, "labels": labels, "cu_seqlens": offsets}


class Clock(pl.Callback):
    """Times all batches, the first with its set-up."""

    def setup(self, *_: Any, **__: Any) -> None:
        """Of Trainer."""
        self.start = time.perf_counter()
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Of Trainer."""
        self.ends.append(time.perf_counter() - self.start)


def seconds_of_fit(model: str, *, pipeline: bool, changing: bool, num_batches: int) -> tuple[float, float, float]:
    """Of all of a fit; of its first batch; the loss that it ends with."""
    torch.manual_seed(0)
    module = PackedText() if model == "varlen" else Speech(packs=model == "ctc")
    clock = Clock()
    strategy = PipelineParallelStrategy(
        pipeline_parallel_size=2, num_microbatches=4, split_batch=split_packed if model == "varlen" else None
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if pipeline else 1,
        strategy=strategy if pipeline else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(module, DataLoader(Batches(model, num_batches, changing), batch_size=None))
    return clock.ends[-1], clock.ends[0], 0.0


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(NUM_BATCHES), default=list(NUM_BATCHES))
    parser.add_argument("--batches", type=int, default=None, help="batches of a fit")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 above {MOST_TIMES_FIXED} x fixed shapes")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows, ratios = [], []
    for model in args.models:
        number = args.batches or NUM_BATCHES[model]
        # one device last: the processes of a pipeline run this script as well, up to its last pipeline
        fixed = seconds_of_fit(model, pipeline=True, changing=False, num_batches=number)
        changing = seconds_of_fit(model, pipeline=True, changing=True, num_batches=number)
        rows.append((model, number, fixed, changing))
        ratios.append(changing[0] / fixed[0])
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return
    print(
        "| model | batches | one device, s | pipeline, fixed shapes, s | pipeline, changing shapes, s | times fixed |"
    )
    print("|---|---|---|---|---|---|")
    for (model, number, fixed, changing), ratio in zip(rows, ratios, strict=True):
        alone = seconds_of_fit(model, pipeline=False, changing=True, num_batches=number)
        print(f"| {model} | {number} | {alone[0]:.1f} | {fixed[0]:.1f} | {changing[0]:.1f} | {ratio:.2f} |", flush=True)
    if args.check and max(ratios) > MOST_TIMES_FIXED:
        sys.exit(1)


if __name__ == "__main__":
    main()
