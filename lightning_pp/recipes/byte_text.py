"""Text files as crops of bytes: no tokenizer, no download, the same batches on every run.

Shape letters: B sequences, T bytes per sequence.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


def standard_library_sources() -> list[Path]:
    """The top-level modules of the running Python's standard library, by name.

    Raises:
        FileNotFoundError: This Python came without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    sources = sorted(folder.glob("*.py"))
    if not sources:
        raise FileNotFoundError(
            f"no *.py in the standard library folder {folder}: this Python ships without its sources; "
            "name your own text with data.files='[my.txt]'"
        )
    return sources


def find_files(patterns: Sequence[str], what: str = "data.files") -> list[Path]:
    """Expand paths and glob patterns (``more/*.md``, ``**`` for any depth) to readable files, in the order given.

    Every problem is reported at once, before anything is launched.

    Args:
        patterns: The paths and patterns.
        what: They are, for the error.

    Raises:
        FileNotFoundError: Some pattern matches no file, or some file cannot be read; the message names each.
    """
    found: dict[Path, None] = {}
    problems: list[str] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        is_pattern = glob.has_magic(pattern) and not path.exists()
        matches = sorted(Path(m) for m in glob.glob(str(path), recursive=True)) if is_pattern else [path]
        if is_pattern:
            matches = [match for match in matches if match.is_file()]
            if not matches:
                problems.append(f"{pattern}: no file matches (looked from {Path.cwd()})")
        for match in matches:
            problem = _why_unreadable(match)
            if problem:
                problems.append(f"{match}: {problem}")
            found[match] = None
    if problems:
        raise FileNotFoundError(f"{what} cannot be read:\n  " + "\n  ".join(problems))
    return list(found)


def _why_unreadable(path: Path) -> str | None:
    if not path.exists():
        return f"does not exist (looked from {Path.cwd()})"
    if path.is_dir():
        return f"is a folder; for the files in it write {path}/* or {path}/**/*.txt"
    try:
        with path.open("rb"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def read_bytes(files: Sequence[Path], max_bytes: int) -> Tensor:
    """Concatenate files in order, one newline between them, cut at ``max_bytes``.

    Returns:
        Byte values, uint8 [N].
    """
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            text += stream.read(max_bytes - len(text))
        if len(text) >= max_bytes:
            break
        text += b"\n"
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


class ByteCrops(Dataset[dict[str, Tensor]]):
    """Crops of a text at fixed offsets.

    Args:
        text: Byte values, uint8 [N].
        offsets: First byte of each crop, int64 [num_crops].
        seq_len: Bytes per crop T.
    """

    def __init__(self, text: Tensor, offsets: Tensor, seq_len: int) -> None:
        self.text = text
        self.offsets = offsets
        self.seq_len = seq_len

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``{"input_ids": int64 [T]}``."""
        start = int(self.offsets[index])
        return {"input_ids": self.text[start : start + self.seq_len].long()}


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """Resumes within an epoch from its saved state, which Lightning saves and loads for the loaders of a fit."""

    _start = _position = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override] # a generator is an iterator, too
        start, self._start = self._start, 0
        self._position = start
        return self._from(start)

    def _from(self, start: int) -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self._position = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        """How many batches of the epoch have been taken."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Has the next epoch begin after as many batches; after none, where it had been taken whole."""
        self._start = state["position"] % len(self)


class ByteTextDataModule(L.LightningDataModule):
    """Random crops of text files for training, evenly spaced crops of their last part for evaluation.

    Batches are ``{"input_ids": int64 [B, T]}`` of byte values. Which crops an epoch holds depends only on the files and
    on ``seed``, so every process sees the same, and a resumed run those that come next.

    Args:
        files: Paths and glob patterns. Empty: the source code of the running Python's standard library.
        batch_size: Sequences B in the batch of a data-parallel rank.
        seq_len: Bytes per sequence T.
        num_train_crops: Training crops per epoch.
        num_val_crops: Crops for each of validation, test and prediction.
        val_fraction: Share of the text, from its end, for evaluation.
        max_bytes: Text beyond this is not read.
        seed: Seed of the training crops.
        num_workers: Loader processes; reading crops from memory needs none.

    Raises:
        FileNotFoundError: A file is missing or cannot be read.
        ValueError: A size is below 1, ``val_fraction`` is not between 0 and 1, or the files hold too little text.
    """

    def __init__(
        self,
        files: Sequence[str] = (),
        batch_size: int = 16,
        seq_len: int = 128,
        num_train_crops: int = 1 << 16,
        num_val_crops: int = 64,
        val_fraction: float = 0.05,
        max_bytes: int = 4 << 20,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        sizes = {
            "batch_size": batch_size,
            "seq_len": seq_len,
            "num_train_crops": num_train_crops,
            "num_val_crops": num_val_crops,
            "max_bytes": max_bytes,
        }
        problems = [f"data.{name}={value}: must be at least 1" for name, value in sizes.items() if value < 1]
        if not 0 < val_fraction < 1:
            problems.append(f"data.val_fraction={val_fraction}: must be between 0 and 1")
        if problems:
            raise ValueError("\n".join(problems))
        self.files = find_files(files) if files else standard_library_sources()
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.num_train_crops = num_train_crops
        self.num_val_crops = num_val_crops
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes
        self.seed = seed
        self.num_workers = num_workers
        self._check_amount()
        self._train: ByteCrops | None = None
        self._val: ByteCrops | None = None

    def _check_amount(self) -> None:
        """Both parts must hold a crop; checked by file sizes so that it fails before any process is launched."""
        num_bytes = min(self.max_bytes, sum(os.path.getsize(file) + 1 for file in self.files))
        num_val_bytes = int(num_bytes * self.val_fraction)
        if min(num_val_bytes, num_bytes - num_val_bytes) < self.seq_len:
            raise ValueError(
                f"{len(self.files)} files hold {num_bytes} bytes (data.max_bytes={self.max_bytes}): "
                f"{num_bytes - num_val_bytes} for training and {num_val_bytes} for evaluation at "
                f"data.val_fraction={self.val_fraction}, but a sequence takes data.seq_len={self.seq_len}. "
                "Give more text, lower data.seq_len or change data.val_fraction"
            )

    def setup(self, stage: str | None = None) -> None:
        """Read the files and place the crops."""
        if self._train is not None:
            return
        text = read_bytes(self.files, self.max_bytes)
        num_val_bytes = int(len(text) * self.val_fraction)
        train_text, val_text = text[: len(text) - num_val_bytes], text[len(text) - num_val_bytes :]
        generator = torch.Generator().manual_seed(self.seed)
        last = len(train_text) - self.seq_len
        train_offsets = torch.randint(0, last + 1, (self.num_train_crops,), generator=generator)
        val_offsets = torch.linspace(0, len(val_text) - self.seq_len, self.num_val_crops).long()
        self._train = ByteCrops(train_text, train_offsets, self.seq_len)
        self._val = ByteCrops(val_text, val_offsets, self.seq_len)

    def _loader(self, crops: ByteCrops | None) -> DataLoader[dict[str, Tensor]]:
        if crops is None:
            raise RuntimeError("ByteTextDataModule.setup() has not run: let the Trainer call it, or call it yourself")
        # Crops already lie at random offsets: no shuffling, so that the order too is the same on every run.
        return DataLoader(crops, batch_size=self.batch_size, num_workers=self.num_workers)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Batches of random crops."""
        loader = self._loader(self._train)
        return ResumableLoader(loader.dataset, batch_size=self.batch_size, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Batches of evenly spaced crops of the last part of the text."""
        return self._loader(self._val)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The crops of :meth:`val_dataloader`."""
        return self._loader(self._val)

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The crops of :meth:`val_dataloader`."""
        return self._loader(self._val)
