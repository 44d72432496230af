"""Tokens on disk: one memory-mapped file of all documents, one after the other, and where each begins.

A folder of tokens has ``tokens.bin`` (little-endian integers), ``offsets.bin`` (int64, little-endian: the first token
of each document, and the number of tokens) and ``dataset.json``, which tells their sizes and where they come from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

VERSION = 1
INFO, TOKENS, OFFSETS = "dataset.json", "tokens.bin", "offsets.bin"


@dataclass(frozen=True)
class TokenInfo:
    """What ``dataset.json`` tells.

    Attributes:
        dtype: Of a token: ``uint8``, ``uint16`` or ``uint32``.
        num_tokens: In all documents.
        num_documents: How many.
        vocab_size: Tokens are below it.
        tokenizer: ``byte``, or the path that was given.
        end: The token that ends each document; None if they have none.
        sources: The files that were read.
        version: Of this format.
    """

    dtype: str
    num_tokens: int
    num_documents: int
    vocab_size: int
    tokenizer: str
    end: int | None
    sources: list[str] = field(default_factory=list)
    version: int = VERSION


class TokenWriter:
    """Writes a folder of tokens, which appears when it is whole.

    Args:
        folder: To make; must not exist.
        vocab_size: Tokens are below it; it decides the dtype.

    Raises:
        FileExistsError: The folder exists.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        if os.path.lexists(folder):
            raise FileExistsError(f"{folder} exists; give another folder, or remove it")
        self.folder = folder
        self.dtype = next(d for d in ("uint8", "uint16", "uint32") if vocab_size - 1 <= np.iinfo(d).max)
        self.vocab_size = vocab_size
        self.num_tokens = self.num_documents = 0
        self._staged = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._staged, ignore_errors=True)
        self._staged.mkdir()
        self._tokens: IO[bytes] = (self._staged / TOKENS).open("wb")
        self._offsets: IO[bytes] = (self._staged / OFFSETS).open("wb")
        self._offsets.write(np.array([0], "<i8").tobytes())

    def add(self, documents: Iterable[npt.ArrayLike]) -> None:
        """Append documents, each a sequence of tokens; empty ones are left out.

        Raises:
            ValueError: A token is not below ``vocab_size``.
        """
        for document in documents:
            tokens = np.asarray(document)
            if not tokens.size:
                continue
            if int(tokens.max()) >= self.vocab_size:
                raise ValueError(f"token {int(tokens.max())} is not below the vocabulary's size {self.vocab_size}")
            self._tokens.write(tokens.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes())
            self.num_tokens += tokens.size
            self.num_documents += 1
            self._offsets.write(np.array([self.num_tokens], "<i8").tobytes())

    def finish(self, *, tokenizer: str, end: int | None, sources: list[str]) -> TokenInfo:
        """Put the folder in its place.

        Raises:
            ValueError: No document has been added.
        """
        if not self.num_documents:
            raise ValueError(f"the sources hold no text, so {self.folder} is not made")
        info = TokenInfo(self.dtype, self.num_tokens, self.num_documents, self.vocab_size, tokenizer, end, sources)
        for file in (self._tokens, self._offsets):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        (self._staged / INFO).write_text(json.dumps(asdict(info), indent=2) + "\n")
        self._staged.rename(self.folder)
        return info

    def close(self) -> None:
        """Remove what has been written, unless it is whole."""
        self._tokens.close()
        self._offsets.close()
        shutil.rmtree(self._staged, ignore_errors=True)


class TokenFiles:
    """A folder of tokens, memory-mapped.

    Args:
        folder: Made by ``lightning-pp-data``.

    Attributes:
        info: What ``dataset.json`` tells.
        tokens: All tokens, [num_tokens].
        offsets: First token of each document, and the number of tokens, int64 [num_documents + 1].

    Raises:
        FileNotFoundError: The folder does not exist, or is not a folder of tokens.
        ValueError: Its files are not as long as it tells, or are of another version.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / INFO).is_file():
            raise FileNotFoundError(
                f"{folder} is not a folder of tokens: it has no {INFO} (looked from {Path.cwd()}). Make one with "
                f"lightning-pp-data FILES --output {folder}"
            )
        content: dict[str, Any] = json.loads((folder / INFO).read_text())
        if content.get("version") != VERSION:
            raise ValueError(f"{folder / INFO} has version {content.get('version')}, but this release reads {VERSION}")
        self.info = TokenInfo(**content)
        dtype = np.dtype(self.info.dtype).newbyteorder("<")
        lengths = {TOKENS: self.info.num_tokens * dtype.itemsize, OFFSETS: (self.info.num_documents + 1) * 8}
        for name, length in lengths.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != length:
                raise ValueError(
                    f"{folder / name} should have {length} bytes and has {found or 0}: copy the folder again"
                )
        self.tokens: npt.NDArray[Any] = np.memmap(folder / TOKENS, dtype, "r")
        self.offsets: npt.NDArray[Any] = np.memmap(folder / OFFSETS, np.dtype("<i8"), "r")
