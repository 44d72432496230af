"""Training on a folder of tokens: windows of joined documents, with or without masks, in one row, or a document a row.

Shape letters: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pp.recipes.token_files import TokenFiles

LAYOUTS = ("joined", "masked", "separate", "packed")
IGNORED = -100  # a label that does not count


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of ``seq_len`` tokens over joined documents; the last tokens that fill none are left out.

    Args:
        files: The tokens.
        first: First document.
        last: Document after the last.
        seq_len: Tokens of a window T.
        masked: Whether rows tell their documents apart.
    """

    def __init__(self, files: TokenFiles, first: int, last: int, seq_len: int, masked: bool) -> None:
        self.files, self.seq_len, self.masked = files, seq_len, masked
        self.begin, self.end = int(files.offsets[first]), int(files.offsets[last])

    def __len__(self) -> int:
        return (self.end - self.begin) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids``, int64 [T]; if masked also ``position_ids`` and ``labels``, int64 [T].

        Positions count from the beginning of a document, or of the row. The first token of a document is not a label,
        since nothing before it in the row is of its document.
        """
        start = self.begin + index * self.seq_len
        stop = start + self.seq_len
        tokens = torch.from_numpy(self.files.tokens[start:stop].astype(np.int64))
        if not self.masked:
            return {"input_ids": tokens}
        offsets = self.files.offsets
        low, high = np.searchsorted(offsets, [start, stop])
        begins = torch.from_numpy((offsets[low:high] - start).astype(np.int64))
        row = torch.arange(self.seq_len)
        position_ids = row.clone()
        for begin in begins.tolist():
            position_ids[begin:] = row[: self.seq_len - begin]
        labels = tokens.clone()
        labels[begins] = IGNORED
        return {"input_ids": tokens, "position_ids": position_ids, "labels": labels}


class Documents(Dataset[Tensor]):
    """One document a row, cut into pieces of ``seq_len`` tokens where it is longer.

    Args:
        files: The tokens.
        first: First document.
        last: Document after the last.
        seq_len: Most tokens of a row.
    """

    def __init__(self, files: TokenFiles, first: int, last: int, seq_len: int) -> None:
        self.files, self.seq_len = files, seq_len
        self.offsets = np.array(files.offsets[first : last + 1])
        pieces = -(-np.diff(self.offsets) // seq_len)
        self.ends = np.cumsum(pieces)  # number of pieces up to and with each document

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Tensor:
        """Tokens of a piece, int64 [up to T]."""
        document = int(np.searchsorted(self.ends, index, side="right"))
        piece = index - (int(self.ends[document - 1]) if document else 0)
        start = int(self.offsets[document]) + piece * self.seq_len
        stop = min(start + self.seq_len, int(self.offsets[document + 1]))
        return torch.from_numpy(self.files.tokens[start:stop].astype(np.int64))


def pad(rows: Sequence[Tensor], multiple: int = 1) -> dict[str, Tensor]:
    """Rows of one length: that of the longest, rounded up.

    Args:
        rows: Tokens of each, int64.
        multiple: Of which the length is one.

    Returns:
        ``input_ids``, with 0 after the end of a row; ``attention_mask``, 1 for tokens; ``labels``, -100 after the end;
        int64 [B, T].
    """
    length = -(-max(len(row) for row in rows) // multiple) * multiple
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for number, row in enumerate(rows):
        input_ids[number, : len(row)] = row
        attention_mask[number, : len(row)] = 1
        labels[number, : len(row)] = row
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def pack(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Masked windows as one row, [1, B T]; the first token of a window is not a label, nor a part of the one before."""
    labels = [row["labels"].clone() for row in rows]
    for of_window in labels:
        of_window[0] = IGNORED
    joined = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
    return {name: row.unsqueeze(0) for name, row in (*joined.items(), ("labels", torch.cat(labels)))}


class TokenDataModule(L.LightningDataModule):
    """A folder of tokens, made by ``lightning-pp-data``; its last documents are kept for evaluation.

    Training is shuffled, anew in each epoch. A resumed training goes on with the batch that would have come next.

    Args:
        directory: Folder that ``lightning-pp-data`` made.
        batch_size: Rows B in the batch of a data-parallel rank.
        seq_len: Tokens T per row.
        documents: How documents become rows: ``joined``, ``masked``, ``separate`` or ``packed``. ``joined``: windows
            over all documents. ``masked``: the same, but no document attends to another; the model must take
            ``position_ids`` and ``labels``, as transformers models do. ``separate``: one document, or a piece of one,
            per row; a batch is as long as its longest row, rounded up to ``pad_to_multiple``. ``packed``: as
            ``masked``, with all windows of a batch in one row of B T tokens, which
            :func:`~lightning_pp.split_packed` cuts between documents.
        pad_to_multiple: For ``separate``, lengths are rounded up to this multiple. Fewer lengths mean fewer plans and
            fewer compiled kernels.
        val_fraction: Share of the documents, from the end, for evaluation.
        num_val_batches: Limit of batches per validation.
        num_workers: Loader processes.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: An argument is out of its range, or the documents fill no batch.
    """

    def __init__(
        self,
        directory: str,
        batch_size: int = 16,
        seq_len: int = 1024,
        documents: str = "joined",
        pad_to_multiple: int = 64,
        val_fraction: float = 0.01,
        num_val_batches: int = 16,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "pad_to_multiple": pad_to_multiple}
        problems = [f"data.{name}={value}: must be at least 1" for name, value in sizes.items() if value < 1]
        if documents not in LAYOUTS:
            problems.append(f"data.documents={documents}: must be one of {', '.join(LAYOUTS)}")
        if not 0 < val_fraction < 1:
            problems.append(f"data.val_fraction={val_fraction}: must be between 0 and 1")
        if problems:
            raise ValueError("\n".join(problems))
        self.files = TokenFiles(Path(directory).expanduser())
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.documents = documents
        self.pad_to_multiple = pad_to_multiple
        self.num_val_batches = num_val_batches
        self.num_workers = num_workers
        number = self.files.info.num_documents
        self._num_train = number - max(1, int(number * val_fraction))
        for what, first, last in (("training", 0, self._num_train), ("evaluation", self._num_train, number)):
            rows = len(self._dataset(first, last)) if last > first else 0
            if not rows:
                raise ValueError(
                    f"{directory} has {number} documents. {last - first} of them are for {what} "
                    f"(data.val_fraction={val_fraction}) and do not fill a row of data.seq_len={seq_len}. Give more "
                    "documents (lightning-pp-data --lines makes one of each line), or lower data.seq_len"
                )

    def _dataset(self, first: int, last: int) -> Any:
        if self.documents == "separate":
            return Documents(self.files, first, last, self.seq_len)
        return Windows(self.files, first, last, self.seq_len, masked=self.documents != "joined")

    def _collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        return pack(rows) if self.documents == "packed" else pad(rows, self.pad_to_multiple)

    def _loader(self, dataset: Any, *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=self._collate if self.documents in ("separate", "packed") else None,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """All rows of the training documents, shuffled."""
        return self._loader(self._dataset(0, self._num_train), shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The first rows of the evaluation documents, in order."""
        dataset = self._dataset(self._num_train, self.files.info.num_documents)
        rows = range(min(len(dataset), self.num_val_batches * self.batch_size))
        return self._loader(torch.utils.data.Subset(dataset, rows), shuffle=False)

    test_dataloader: Any = val_dataloader
    predict_dataloader: Any = val_dataloader
