"""Text to tokens: bytes, or a tokenizer on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_pp.errors import ConfigurationError


@dataclass(frozen=True)
class Encoder:
    """A tokenizer.

    Attributes:
        name: ``byte``, or its path.
        vocab_size: Tokens are below it.
        end: The token that ends each document, which ``encode`` adds; None adds none.
        encode: From texts to the tokens of each.
    """

    name: str
    vocab_size: int
    end: int | None
    encode: Callable[[Sequence[str]], list[Any]]


def find_tokenizer(name: str, end: str | None) -> Encoder:
    """Open a tokenizer; nothing is downloaded.

    Args:
        name: ``byte``, a ``tokenizer.json``, or a directory that ``AutoTokenizer.from_pretrained`` reads.
        end: The text of the token that ends a document; None is the tokenizer's own, empty is none.

    Raises:
        ConfigurationError: It cannot be opened, or knows no such token.
    """
    if name == "byte":
        if end:
            raise ConfigurationError(f"the end token {end} does not exist: the tokenizer 'byte' has only the 256 bytes")
        return Encoder(name, 256, None, lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts])
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigurationError(
            f"the tokenizer {name} does not exist (looked from {Path.cwd()}): give byte, a tokenizer.json, or a "
            "directory with a tokenizer. One of a hub has to be downloaded first"
        )
    return _encoder_from_directory(path, end) if path.is_dir() else _encoder_from_file(path, end)


def _encoder_from_file(path: Path, end: str | None) -> Encoder:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        why = f"the tokenizer {path} needs tokenizers: pip install tokenizers"
        raise ConfigurationError(why) from error
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigurationError(f"the tokenizer {path} cannot be read: {error}") from error
    number = tokenizer.token_to_id(end) if end else None
    _check_end(path, end, number)

    def encode(texts: Sequence[str]) -> list[Any]:
        return [_ended(each.ids, number) for each in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    return Encoder(str(path), tokenizer.get_vocab_size(with_added_tokens=True), number, encode)


def _encoder_from_directory(path: Path, end: str | None) -> Encoder:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            f"the tokenizer {path} needs transformers: pip install 'transformers>=4.56'"
        ) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the tokenizer {path} cannot be read: {error}") from error
    number = tokenizer.eos_token_id if end is None else tokenizer.get_vocab().get(end) if end else None
    _check_end(path, end, number)

    def encode(texts: Sequence[str]) -> list[Any]:
        found = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [_ended(ids, number) for ids in found["input_ids"]]

    return Encoder(str(path), len(tokenizer), number, encode)


def _check_end(path: Path, end: str | None, number: int | None) -> None:
    if end and number is None:
        raise ConfigurationError(f"the tokenizer {path} has no token {end}")


def _ended(tokens: list[int], end: int | None) -> list[int]:
    return tokens if end is None or not tokens else [*tokens, end]
