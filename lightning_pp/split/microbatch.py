"""Cutting a batch into microbatches along dimension 0."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_pp.errors import BatchError, ConfigurationError
from lightning_pp.split.tree import leaves_of, map_leaves


@dataclass(frozen=True)
class Microbatch:
    """One slice of a batch.

    Attributes:
        data: The slice, in the containers of the batch. Tensors are views of the batch's.
        num_samples: Length of the slice along dimension 0.
        weight: Its share of the batch's samples; the weights of a batch's microbatches sum to 1.
    """

    data: Any
    num_samples: int
    weight: float


def batch_size_of(batch: Any) -> int | None:
    """Number of samples in ``batch``: the length along dimension 0 that most of its tensors share.

    Among equally frequent lengths the one met first counts. A batch without tensors of at least one dimension counts
    the elements of its first flat list of plain values (a list of strings, say). ``None`` where neither is found.
    """
    lengths = Counter(leaf.shape[0] for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0)
    if lengths:
        return lengths.most_common(1)[0][0]
    return next((len(values) for values in _plain_lists(batch)), None)


def split_batch(batch: Any, num_microbatches: int) -> list[Microbatch]:
    """Cuts ``batch`` into at most ``num_microbatches`` slices along dimension 0.

    Every tensor whose dimension 0 has the batch's length is cut, wherever it stands in the batch's tree; so is a list
    of that length that holds only plain values. All else (scalars, masks of another shape, class weights) goes whole to
    every microbatch. Where the length is not divisible, the first slices have one sample more; where it is smaller
    than ``num_microbatches``, there are as many microbatches as samples.

    Raises:
        BatchError: The batch is empty, or holds data that has no dimension 0 to cut (packed, nested or sparse).
        ConfigurationError: ``num_microbatches`` is less than 1.
    """
    if num_microbatches < 1:
        raise ConfigurationError(f"num_microbatches={num_microbatches} is not possible; use 1 or more, or 'auto'.")
    num_samples = batch_size_of(batch)
    if num_samples is None:
        if num_microbatches > 1 and batch is not None and not isinstance(batch, (bool, int, float, str)):
            raise BatchError(
                f"A batch of type {type(batch).__name__} holds no tensor with a dimension 0, so it cannot be cut into "
                f"{num_microbatches} microbatches. Return tensors (in tuples, dicts or dataclasses) from the "
                "dataloader, register the type with torch.utils._pytree, or set num_microbatches=1."
            )
        return [Microbatch(batch, 1, 1.0)]
    if num_samples == 0:
        raise BatchError("The batch has 0 samples (dimension 0 of its tensors is 0); drop empty batches in the loader.")
    num_slices = min(num_microbatches, num_samples)
    if num_slices == 1:
        return [Microbatch(batch, num_samples, 1.0)]
    _refuse_uncuttable(batch, num_slices)
    smaller, larger = divmod(num_samples, num_slices)
    microbatches, start = [], 0
    for index in range(num_slices):
        stop = start + smaller + (index < larger)
        data = _slice(batch, num_samples, start, stop)
        microbatches.append(Microbatch(data, stop - start, (stop - start) / num_samples))
        start = stop
    return microbatches


def copy_of(data: Any) -> Any:
    """``data`` with memory of its own for every tensor, for steps that write into their batch."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, data)


def _slice(tree: Any, num_samples: int, start: int, stop: int) -> Any:
    if _is_plain_list(tree):
        return tree[start:stop] if len(tree) == num_samples else tree
    if isinstance(tree, Tensor):
        return tree[start:stop] if tree.dim() > 0 and tree.shape[0] == num_samples else tree
    if type(tree) in (list, tuple):
        return type(tree)(_slice(child, num_samples, start, stop) for child in tree)
    if type(tree) is dict:
        return {key: _slice(child, num_samples, start, stop) for key, child in tree.items()}
    return map_leaves(lambda leaf: _slice(leaf, num_samples, start, stop) if isinstance(leaf, Tensor) else leaf, tree)


def _is_plain_list(tree: Any) -> bool:
    return (
        type(tree) in (list, tuple)
        and len(tree) > 0
        and all(isinstance(value, (str, bytes, bool, int, float)) for value in tree)
    )


def _plain_lists(tree: Any) -> list[Any]:
    if _is_plain_list(tree):
        return [tree]
    if type(tree) in (list, tuple):
        return [found for child in tree for found in _plain_lists(child)]
    if isinstance(tree, dict):
        return [found for child in tree.values() for found in _plain_lists(child)]
    return []


def _refuse_uncuttable(tree: Any, num_slices: int) -> None:
    if isinstance(tree, PackedSequence) or (
        type(tree) in (list, tuple) and any(isinstance(child, PackedSequence) for child in tree)
    ):
        raise BatchError(
            f"A PackedSequence cannot be cut into {num_slices} microbatches; pad instead, or set num_microbatches=1."
        )
    for leaf in leaves_of(tree):
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            raise BatchError(
                f"A tensor of layout {leaf.layout}{' (nested)' if leaf.is_nested else ''} cannot be cut into "
                f"{num_slices} microbatches; use a dense tensor, or set num_microbatches=1."
            )
