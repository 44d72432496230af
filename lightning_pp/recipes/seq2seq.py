"""Encoder-decoders of the transformers library (extra ``hf``), trained to fill in spans of text that are left out.

Shape letters: B sequences, T tokens per sequence, S tokens of the input, L tokens to predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_pp.recipes.byte_text import ByteTextDataModule, ResumableLoader
from lightning_pp.recipes.transformers_module import TransformersModule

NUM_SPECIAL = 3  # padding, end and unknown, as in ByT5: byte b is token b + 3
END = 1
NUM_BYTES = 256


class Seq2SeqLM(TransformersModule):
    """A transformers encoder-decoder; the loss is the mean cross-entropy of the target's tokens in nats.

    Batches are dicts with ``input_ids``, int64 [B, S], and ``labels``, int64 [B, L]; labels of -100 do not count.
    """

    auto_class = "AutoModelForSeq2SeqLM"
    peft_task = "SEQ_2_SEQ_LM"


def corrupt(text: Tensor, num_spans: int, span_length: int) -> dict[str, Tensor]:
    """Leave out spans of a text, as T5 is trained: a sentinel stands for each, and the target has what they held.

    Which bytes they are depends on the text alone, so that a text is the same on every run.

    Args:
        text: Byte values, int64 [T]; T is at least ``num_spans * (span_length + 1)``.
        num_spans: Spans to leave out.
        span_length: Bytes of each.

    Returns:
        ``input_ids``, int64 [T - num_spans * (span_length - 1)], and ``labels``, int64
        [num_spans * (span_length + 1) + 1]: each sentinel (tokens from 259) with its span, and the end.
    """
    generator = torch.Generator().manual_seed(int(text.sum()) * len(text) + int(text[0]))
    room = len(text) // num_spans
    offsets = torch.randint(0, room - span_length, (num_spans,), generator=generator)
    tokens = text + NUM_SPECIAL
    inputs: list[Tensor] = []
    labels: list[Tensor] = []
    done = 0
    for number in range(num_spans):
        start = number * room + int(offsets[number])
        sentinel = torch.tensor([NUM_SPECIAL + NUM_BYTES + number])
        inputs += [tokens[done:start], sentinel]
        labels += [sentinel, tokens[start : start + span_length]]
        done = start + span_length
    inputs.append(tokens[done:])
    labels.append(torch.tensor([END]))
    return {"input_ids": torch.cat(inputs), "labels": torch.cat(labels)}


class SpanCorruptionDataModule(ByteTextDataModule):
    """The crops of :class:`ByteTextDataModule`, with spans left out that are to be filled in.

    Tokens are those of ByT5: bytes from 3 on, one sentinel for each span after them.

    Args:
        num_spans: Spans removed from each sequence.
        span_length: Bytes per span.
        arguments: Of :class:`ByteTextDataModule`.

    Raises:
        ValueError: The spans do not fit into a sequence.
    """

    def __init__(self, num_spans: int = 8, span_length: int = 3, **arguments: Any) -> None:
        super().__init__(**arguments)
        if num_spans < 1 or span_length < 1 or num_spans * (span_length + 1) > self.seq_len:
            raise ValueError(
                f"data.num_spans={num_spans} of data.span_length={span_length} with a byte between them take "
                f"{num_spans * (span_length + 1)} bytes. Lower one of them, or raise data.seq_len={self.seq_len}"
            )
        self.num_spans = num_spans
        self.span_length = span_length

    def _collate(self, crops: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        parts = [corrupt(crop["input_ids"], self.num_spans, self.span_length) for crop in crops]
        batch: dict[str, Tensor] = default_collate(parts)
        return batch

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Batches of random crops."""
        return ResumableLoader(
            self._loader(self._train).dataset,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=self._collate,
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Batches of evenly spaced crops of the last part of the text."""
        dataset = self._loader(self._val).dataset
        return DataLoader(dataset, batch_size=self.batch_size, num_workers=self.num_workers, collate_fn=self._collate)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader
