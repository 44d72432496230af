"""Checks that all ranks of a pipeline see the same batch: fingerprints of batches, and their comparison.

Every rank computes the whole step's inter-unit code on its own batch, so a rank with another batch would train on a
mixture of two. A fingerprint has one number for each entry of the batch; it covers shapes, dtypes, every byte of every
tensor and array, strings and plain numbers. Of a batch of more than :data:`WHOLE_BATCH_BYTES` the first two of a run
are read whole, and later ones a part at a time, another in each batch, so that a difference that stays in its place is
found within :data:`MOST_PARTS` batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pp.distributed._torch_private import sparse_parts
from lightning_pp.errors import BatchError
from lightning_pp.split.data.tree import entries_of

WHOLE_BATCH_BYTES = 4 << 20
"""A batch of up to this many bytes is always read whole."""
MOST_PARTS = 16
"""The number of batches in which every byte of a larger one has been read."""

_BLOCK_BYTES = 8 << 20
_SMALL_BYTES = 16 << 10
_NEVER_IN_PARTS_BYTES = 64 << 10
_ROW_WORDS = 1 << 15
_LOW_HALF = 0xFFFFFFFF


@dataclass(frozen=True)
class Fingerprint:
    """One rank's fingerprint of a batch.

    Attributes:
        rank: The global rank.
        numbers: One for each entry of the batch, in order, after one for the names of the entries.
        places: Names of the entries, such as ``batch['labels']``; they stay on this rank.
    """

    rank: int
    numbers: tuple[int, ...]
    places: tuple[str, ...] = field(default=(), compare=False)

    def __reduce__(self) -> Any:
        return Fingerprint, (self.rank, self.numbers)


def fingerprint(batch: Any, rank: int = 0, part: int | None = None) -> Fingerprint:
    """Fingerprint of ``batch``: equal for equal batches, and different for others but for one case in 2**32.

    The host reads at 5 to 15 GB/s. A tensor on an accelerator is read there; the host waits for the accelerator once.

    Args:
        batch: Any tree of tensors, arrays, strings, numbers and objects with attributes.
        rank: This process's global rank.
        part: If given and the batch is larger than :data:`WHOLE_BATCH_BYTES`: which part of it to read, counted on
            from batch to batch. None: all of it.
    """
    places: list[str] = []
    numbers: list[Any] = []
    leaves = list(entries_of(batch, "batch"))
    num_bytes = sum(_num_bytes(leaf) for _, leaf in leaves)
    num_parts = min(MOST_PARTS, -(-num_bytes // WHOLE_BATCH_BYTES)) if part is not None else 1
    for place, leaf in leaves:
        places.append(place)
        numbers.append(_number(leaf, 0 if part is None else part, max(1, num_parts)))
    names = zlib.crc32("\n".join(places).encode())
    return Fingerprint(rank, (names, *_on_host(numbers)), tuple(places))


def check_same_batch(fingerprints: Sequence[Fingerprint], batch_idx: int) -> None:
    """Raises :class:`BatchError` with the ranks and the entries that differ, unless all fingerprints are equal.

    Args:
        fingerprints: Of ranks of one pipeline, for the same batch.
        batch_idx: Its index, for the message.
    """
    if different := _different(fingerprints, "loaded"):
        raise BatchError(
            f"Batch {batch_idx} differs between the ranks of one pipeline{different}. Every rank of a pipeline must "
            "load the same batch. Seed the random numbers of the dataset, its transforms and its sampler "
            "(seed_everything(seed, workers=True)), and let none of them depend on the rank. Shard data by "
            "strategy.data_parallel_rank and strategy.data_parallel_size, not by global_rank."
        )


def check_same_given(fingerprints: Sequence[Fingerprint], batch_idx: int) -> None:
    """As :func:`check_same_batch`, of what the step is given: the hooks of the transfer have changed the batch.

    Args:
        fingerprints: Of ranks of one pipeline, for the batch after ``on_after_batch_transfer``.
        batch_idx: Its index, for the message.
    """
    if different := _different(fingerprints, "gave the step"):
        raise BatchError(
            f"The ranks of one pipeline loaded the same batch {batch_idx}, but it differs after "
            f"on_after_batch_transfer{different}. Every rank must pass its step the same batch. In transfer hooks, "
            "draw from the default generators, which are equal on all ranks of a pipeline, or from one that is seeded "
            "equally. Transfer hooks must not depend on the rank."
        )


def _different(fingerprints: Sequence[Fingerprint], did: str) -> str:
    """Where they differ and which ranks are alike; empty if all are equal."""
    if len({each.numbers for each in fingerprints}) == 1:
        return ""
    groups: dict[tuple[int, ...], list[int]] = {}
    for each in fingerprints:
        groups.setdefault(each.numbers, []).append(each.rank)
    listed = " and ".join(_listed(ranks) for ranks in sorted(sorted(ranks) for ranks in groups.values()))
    return (
        f"{_places_that_differ(fingerprints)}: {listed} {did} {len(groups)} different batches ({len(fingerprints)} "
        "ranks were compared, entry by entry)"
    )


def _places_that_differ(fingerprints: Sequence[Fingerprint]) -> str:
    if len({each.numbers[0] for each in fingerprints}) > 1:
        return " in the entries that it has"
    places = next((each.places for each in fingerprints if each.places), ())
    columns = list(zip(*(each.numbers[1:] for each in fingerprints), strict=True))
    found = [
        places[index] if index < len(places) else f"entry {index}"
        for index, column in enumerate(columns)
        if len(set(column)) > 1
    ]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f" at {', '.join(found[:3])}{more}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ---------------------------------------------------------------- numbers


def _number(leaf: Any, part: int, num_parts: int) -> Any:
    """A number for one entry; of a tensor on an accelerator a tensor there, to be read with the others'."""
    if isinstance(leaf, Tensor):
        shape = "nested" if leaf.is_nested else tuple(leaf.shape)
        seed = zlib.crc32(f"{leaf.dtype} {shape} {leaf.layout}".encode())
        numbers = [_number_of_tensor(dense, part, num_parts) for dense in _dense_parts(leaf)]
        found: Any = seed
        for number in numbers:
            found = (found * 31 + number) if isinstance(number, Tensor) else _mixed(found, number)
        return found
    if isinstance(leaf, np.ndarray):
        seed = zlib.crc32(f"{leaf.dtype} {leaf.shape}".encode())
        if leaf.dtype.hasobject:
            return _mixed(seed, zlib.crc32(repr(leaf.tolist()).encode()))
        raw = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        return _mixed(seed, _number_of_bytes(raw[_share(raw.size, part, num_parts, unit=8)]))
    if isinstance(leaf, bytes):
        return zlib.crc32(leaf)
    if isinstance(leaf, (str, bool, int, float, complex, np.generic, type(None))):
        return zlib.crc32(f"{type(leaf).__name__} {leaf!r}".encode())
    if isinstance(leaf, (set, frozenset)):
        return zlib.crc32(repr(sorted(map(repr, leaf))).encode())
    return zlib.crc32(type(leaf).__qualname__.encode())


def _num_bytes(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return sum(dense.nbytes for dense in _dense_parts(leaf))
    return leaf.nbytes if isinstance(leaf, np.ndarray) else 0


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that ``tensor`` consists of."""
    tensor = tensor.detach()
    if tensor.is_nested:
        if tensor.layout is not torch.jagged:  # of the older layout only the rows can be asked for
            return list(tensor.unbind())
        jagged: Any = tensor
        return [jagged.values(), jagged.offsets()]
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _number_of_tensor(tensor: Tensor, part: int, num_parts: int) -> Any:
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    if tensor.nbytes <= _NEVER_IN_PARTS_BYTES:
        part, num_parts = 0, 1
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous() and tensor.dim() > 0:
        tensor = tensor[_share(tensor.shape[0], part, num_parts)].contiguous()
        part, num_parts = 0, 1
    raw = tensor.reshape(-1).view(torch.uint8)
    raw = raw[_share(raw.numel(), part, num_parts, unit=8)]
    return _number_of_bytes(raw.numpy()) if raw.is_cpu else _number_on_device(raw)


def _share(length: int, part: int, num_parts: int, unit: int = 1) -> slice:
    """Share number ``part`` of ``length``, starting at a multiple of ``unit``; every place is in one of the shares."""
    size = -(-length // (num_parts * unit)) * unit
    start = (part % num_parts) * size
    return slice(start, start + size)


@cache
def _weights() -> np.ndarray:
    """Odd multipliers, one for each place in a row, always the same."""
    drawn = np.random.default_rng(20_251_122).integers(0, 1 << 63, _ROW_WORDS, dtype=np.uint64)
    odd: np.ndarray = drawn * np.uint64(2) + np.uint64(1)
    return odd


def _folded(words: np.ndarray) -> np.ndarray:
    """A permutation of the words that moves the high bits down: multiplied, only they would reach few bits."""
    folded: np.ndarray = np.right_shift(words, np.uint64(32))
    np.bitwise_xor(folded, words, out=folded)
    return folded


def _number_of_bytes(raw: np.ndarray) -> int:
    """Sum of words times multipliers by place, modulo 2**64, row by row; a checksum for what is small."""
    if raw.size <= _SMALL_BYTES:
        return zlib.crc32(raw.data)
    num_words = raw.size // 8
    words = raw[: num_words * 8].view(np.uint64)
    weights = _weights()
    total = zlib.crc32(raw[num_words * 8 :].data)
    for start in range(0, num_words, _ROW_WORDS):
        row = _folded(words[start : start + _ROW_WORDS])
        total = _mixed(total, int(np.dot(row, weights[: row.size])))
    return total


def _mixed(total: int, number: int) -> int:
    """``total`` with one more number; the order of numbers counts."""
    total = ((total ^ number) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    return total ^ (total >> 29)


def _number_on_device(raw: Tensor) -> Tensor:
    """:func:`_number_of_bytes` where the tensor is, as a tensor there; not the same number.

    Block by block, since a block's temporary copies take four times its bytes.
    """
    sums = torch.cat([_row_sums(block) for block in torch.split(raw, _BLOCK_BYTES)])
    while sums.numel() > 1:
        sums = _row_sums(sums.view(torch.uint8))
    return sums[0]


def _row_sums(raw: Tensor) -> Tensor:
    """For each row of ``_ROW_WORDS`` words the sum of words times multipliers by place, modulo 2**64."""
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % (8 * _ROW_WORDS)))  # a copy, so aligned
    rows = padded.view(torch.int64).view(-1, _ROW_WORDS)
    folded = rows ^ ((rows >> 32) & _LOW_HALF)  # as :func:`_folded`
    return (folded * _weights_on(raw.device)).sum(1)


@cache
def _weights_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_weights().view(np.int64).copy()).to(device)


def _on_host(numbers: Sequence[Any]) -> Iterator[int]:
    """All numbers on the host; those of a device in one copy."""
    places: dict[torch.device, list[Tensor]] = {}
    for number in numbers:
        if isinstance(number, Tensor):
            places.setdefault(number.device, []).append(number)
    iterators = {device: iter(torch.stack(tensors).tolist()) for device, tensors in places.items()}
    for number in numbers:
        yield next(iterators[number.device]) if isinstance(number, Tensor) else number
