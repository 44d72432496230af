"""Training on a stream of the library ``datasets``: documents are read, tokenized and packed into rows during training.

Shape letters: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_pp.errors import ConfigurationError
from lightning_pp.recipes.encoders import find_tokenizer

_DOCUMENTS_AT_ONCE = 64  # tokenizers encode several with several threads
_READERS = ("arrow", "csv", "json", "parquet", "text")  # without files these read all that is in the current folder


class PackedRows(IterableDataset[dict[str, Tensor]]):
    """Rows of ``seq_len`` tokens over joined documents; the last tokens that fill none are left out.

    Args:
        documents: A stream of ``datasets``.
        field: What holds the text of a document.
        tokenizer: As :func:`find_tokenizer` has it. It is opened when a pass begins, in the process that reads.
        end: The token that ends a document, in the same way.
        seq_len: Tokens of a row T.
        num_rows: The most rows; None for all.
    """

    def __init__(
        self, documents: Any, field: str, tokenizer: str, end: str | None, seq_len: int, num_rows: int | None = None
    ) -> None:
        self.documents, self.field = documents, field
        self.tokenizer, self.end = tokenizer, end
        self.seq_len, self.num_rows = seq_len, num_rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """``input_ids``, int64 [T]."""
        return islice(self._rows(), self.num_rows)

    def _rows(self) -> Iterator[dict[str, Tensor]]:
        encoder = find_tokenizer(self.tokenizer, self.end)
        texts, rest = self._texts(), np.empty(0, np.int64)
        while some := list(islice(texts, _DOCUMENTS_AT_ONCE)):
            tokens = np.concatenate([rest, *(np.asarray(each, np.int64) for each in encoder.encode(some))])
            num_full = len(tokens) // self.seq_len * self.seq_len
            for start in range(0, num_full, self.seq_len):
                yield {"input_ids": torch.from_numpy(tokens[start : start + self.seq_len])}
            rest = tokens[num_full:]

    def _texts(self) -> Iterator[str]:
        for number, document in enumerate(self.documents):
            yield text_of(document, self.field, f"document {number} of this rank's part of the stream")


class StreamLoader(DataLoader[dict[str, Tensor]]):
    """Batches of :class:`PackedRows`; resumes within an epoch from its saved state.

    A resumed training reads the batches of the epoch that were trained once more, and drops them.

    Attributes:
        trainer: Whose training it is; it knows how many batches have been trained, since it reads one ahead.
    """

    trainer: Any = None
    _epoch = 0
    _resumed: Mapping[str, int] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override] # a generator is an iterator, too
        """The batches of an epoch.

        Raises:
            ConfigurationError: There is none, or none is left.
        """
        resumed, self._resumed = self._resumed, None
        start = resumed["batches"] if resumed is not None else 0
        if self.trainer is not None:
            self._epoch = resumed["epoch"] if resumed is not None else self.trainer.current_epoch
            self.dataset.documents.set_epoch(self._epoch)  # type: ignore[attr-defined]
        return self._from(start)

    def _from(self, start: int) -> Iterator[dict[str, Tensor]]:
        number = 0
        for number, batch in enumerate(super().__iter__(), 1):
            if number > start:
                yield batch
        if number <= start:
            before = f", and {start} of them had been trained before" if start else ""
            raise ConfigurationError(
                f"The stream has {number} batches of data.batch_size={self.batch_size} rows for each data-parallel "
                f"rank{before}, so there is none to read. Give more text, or smaller or fewer batches"
            )

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches have been trained."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        done, begun = progress.current.processed, progress.current.ready
        if done == begun and (progress.is_last_batch or done >= self.trainer.num_training_batches):
            return {"epoch": self._epoch + 1, "batches": 0}
        return {"epoch": self._epoch, "batches": done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Has the next pass begin there."""
        self._resumed = state


class StreamDataModule(L.LightningDataModule):
    """A stream of the library ``datasets``, shared out by data-parallel rank.

    Batches are ``{"input_ids": int64 [B, T]}``; rows that fill no batch are left out. Every rank of a pipeline reads
    the same. A resumed training goes on with the batch that would have come next, if it reads the same stream.

    Args:
        path: First argument of ``datasets.load_dataset``: ``json``, ``parquet`` or ``text`` with ``data_files``, a
            folder, or a dataset of a hub.
        name: Configuration of a dataset that has several.
        data_files: Path or pattern, a list of them, or a dict of them by split.
        split: Split to train on.
        val_split: Split to validate, test and predict on. None: no validation.
        text_field: Field that holds the text of a document.
        tokenizer: ``byte``, a ``tokenizer.json``, or a directory that ``AutoTokenizer.from_pretrained`` reads.
        end: Token that ends each document. None: the tokenizer's own; empty: none.
        batch_size: Rows B in the batch of a data-parallel rank.
        seq_len: Tokens T per row.
        shuffle_buffer: Documents in the shuffle buffer; 0 keeps the order of the files.
        seed: Seed of the shuffling.
        num_val_batches: Limit of batches per validation.
        num_workers: Loader processes for training; each reads its own files.

    Raises:
        ConfigurationError: The stream or the tokenizer cannot be read, or the first document has no text.
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        data_files: str | Sequence[str] | Mapping[str, Any] | None = None,
        split: str = "train",
        val_split: str | None = None,
        text_field: str = "text",
        tokenizer: str = "byte",
        end: str | None = None,
        batch_size: int = 16,
        seq_len: int = 1024,
        shuffle_buffer: int = 0,
        seed: int = 0,
        num_val_batches: int = 16,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        least = {"batch_size": (batch_size, 1), "seq_len": (seq_len, 1), "num_val_batches": (num_val_batches, 1)}
        least |= {"shuffle_buffer": (shuffle_buffer, 0), "num_workers": (num_workers, 0)}
        problems = [f"data.{key}={value}: must be at least {low}" for key, (value, low) in least.items() if value < low]
        if problems:
            raise ValueError("\n".join(problems))
        find_tokenizer(tokenizer, end)
        self.text_field, self.tokenizer, self.end = text_field, tokenizer, end
        self.batch_size, self.seq_len = batch_size, seq_len
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.num_val_batches, self.num_workers = num_val_batches, num_workers
        self._train = open_stream(path, name, data_files, split, text_field)
        self._val: Any = None
        if val_split is not None:
            self._val = open_stream(path, name, data_files, val_split, text_field)
        else:  # Lightning validates with a val_dataloader that is overridden, and callbacks save after validations
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    def _rows(self, documents: Any, num_rows: int | None = None) -> PackedRows:
        """Those of this rank's replica."""
        from datasets.distributed import split_dataset_by_node

        rank, num_replicas = self._replica()
        mine = split_dataset_by_node(documents, rank, num_replicas)
        return PackedRows(mine, self.text_field, self.tokenizer, self.end, self.seq_len, num_rows)

    def _replica(self) -> tuple[int, int]:
        if self.trainer is None:
            raise ConfigurationError(
                "StreamDataModule has no trainer, so it does not know how many data-parallel ranks share the stream. "
                "Give it to one: trainer.fit(module, datamodule=data)"
            )
        shared = self.trainer.distributed_sampler_kwargs
        if shared is None and self.trainer.world_size > 1:
            name = type(self.trainer.strategy).__name__
            raise ConfigurationError(
                f"{name} does not say how its {self.trainer.world_size} processes share data "
                "(distributed_sampler_kwargs), so the stream cannot be shared out"
            )
        return (shared["rank"], shared["num_replicas"]) if shared is not None else (0, 1)

    def train_dataloader(self) -> StreamLoader:
        """All rows of this replica's documents."""
        documents = self._train
        if self.shuffle_buffer:
            documents = documents.shuffle(seed=self.seed, buffer_size=self.shuffle_buffer)
        rows = self._rows(documents)
        loader = StreamLoader(rows, batch_size=self.batch_size, num_workers=self.num_workers, drop_last=True)
        loader.trainer = self.trainer
        return loader

    def val_dataloader(self) -> StreamLoader:
        """The first rows of this replica's documents, in order."""
        if self._val is None:
            raise ConfigurationError("There is nothing to evaluate on: name a split of the stream, data.val_split=NAME")
        rows = self._rows(self._val, self.num_val_batches * self.batch_size)
        return StreamLoader(rows, batch_size=self.batch_size, drop_last=True)

    def test_dataloader(self) -> StreamLoader:
        """The rows of a validation."""
        return StreamDataModule.val_dataloader(self)

    predict_dataloader: Any = test_dataloader


def open_stream(path: str, name: str | None, data_files: Any, split: str, field: str) -> Any:
    """A stream of ``datasets``, whose first document has been read.

    Args:
        path: As :class:`StreamDataModule` has it; the next three too.
        name: Of a configuration.
        data_files: To read.
        split: Of the dataset.
        field: What holds the text.

    Raises:
        ConfigurationError: It cannot be read, is empty, or has no such text.
    """
    if path in _READERS and not data_files:
        raise ConfigurationError(f"data.path={path} reads files: name them, as data.data_files='[part-*.{path}]'")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigurationError("data=stream needs datasets: pip install 'datasets>=3.2'") from error
    what = f"the stream of data.path={path} data.split={split}"
    try:
        stream: Any = load_dataset(path, name, data_files=data_files, split=split, streaming=True)
        first = next(iter(stream), None)
    except Exception as error:  # of the library, of its readers of files, or of the network
        raise ConfigurationError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
    if first is None:
        raise ConfigurationError(f"{what} has no documents")
    text_of(first, field, f"the first document of {what}")
    return stream


def text_of(document: Mapping[str, Any], field: str, place: str) -> str:
    """The text of a document.

    Args:
        document: A row of the stream.
        field: What holds the text.
        place: Of the document, for errors.

    Raises:
        ConfigurationError: It has no such field, or something else than text in it.
    """
    if field not in document:
        raise ConfigurationError(
            f"{place} has no field {field!r}: it has {', '.join(map(str, document))}. Name the one with the text: "
            "data.text_field=NAME"
        )
    text = document[field]
    if not isinstance(text, str):
        raise ConfigurationError(f"{place}: {field} is a {type(text).__name__}, not text")
    return text
