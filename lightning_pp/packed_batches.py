"""Cuts a row of packed documents into microbatches, for ``split_batch=`` of the strategy."""

from __future__ import annotations

import copy
import itertools
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pp.errors import BatchError
from lightning_pp.split.data.microbatch import BatchPart
from lightning_pp.split.data.tree import map_leaves

# of this function, and of transformers' DataCollatorWithFlattening
_OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_seqlen", "max_length_q", "max_length_k")
_IGNORED = -100


def split_packed(batch: Any, num_microbatches: int) -> list[BatchPart]:
    """Cuts one row of packed documents between documents, for ``PipelineParallelStrategy(split_batch=split_packed)``.

    The documents stay in order. Of all ways to cut between them, the one is taken whose microbatches have the least sum
    of squared numbers of tokens. Each microbatch is one row of whole documents again.

    Args:
        batch: A dict with ``input_ids`` of shape ``(1, tokens)``. Documents begin where ``cu_seqlens`` says
            (``(documents + 1,)``, integers from 0 to tokens), or else where ``position_ids``, of shape ``(1, tokens)``,
            are 0. Any other tensor with one dimension of that many tokens is cut along it. ``cu_seqlens`` and
            ``max_seqlen``, if given, are made anew; ``cu_seq_lens_q``, ``max_length_q`` and the like too. All else goes
            whole to every microbatch.
        num_microbatches: How many microbatches to make.

    Returns:
        The microbatches. Each is weighted by its labels that are not -100; without ``labels``, by its tokens. If the
        loss shifts labels, the first label of each document has to be -100. Otherwise one document predicts the next.

    Raises:
        BatchError: The batch is no such row, has no boundaries of documents, or has fewer documents than
            ``num_microbatches``.
    """
    num_tokens = _num_tokens(batch)
    if num_microbatches == 1:
        return [BatchPart(batch, _num_samples(batch, num_tokens))]
    offsets = _offsets(batch, num_tokens)
    num_documents = len(offsets) - 1
    if num_documents < num_microbatches:
        raise BatchError(
            f"The row of {num_tokens} tokens has {num_documents} documents, but num_microbatches is "
            f"{num_microbatches}, and split_packed does not cut documents. Pack at least {num_microbatches} documents "
            f"into a row, or set num_microbatches={num_documents}."
        )
    bounds = _bounds(offsets, num_microbatches)
    return [_part(batch, num_tokens, offsets[first : last + 1]) for first, last in itertools.pairwise(bounds)]


def _num_tokens(batch: Any) -> int:
    ids = batch.get("input_ids") if isinstance(batch, MutableMapping) else None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
        shape = f", and its 'input_ids' have shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else ""
        raise BatchError(
            "split_packed cuts a dict with 'input_ids', one row of packed documents of shape (1, tokens). The batch is "
            f"of type {type(batch).__name__}{shape or ' and has no such tensor'}."
        )
    return ids.shape[1]


def _offsets(batch: MutableMapping[str, Any], num_tokens: int) -> list[int]:
    """Where documents begin, and the number of tokens; documents without tokens are left out."""
    given = {name: batch[name] for name in _OFFSETS if batch.get(name) is not None}
    if given:
        for name, tensor in given.items():
            offsets = tensor.tolist() if isinstance(tensor, Tensor) and tensor.dim() == 1 else []
            if not offsets or offsets[0] != 0 or offsets[-1] != num_tokens or offsets != sorted(offsets):
                found = f"runs from {offsets[0]} to {offsets[-1]}" if offsets else f"is {tensor!r}"
                raise BatchError(
                    f"{name!r} of the batch {found}. It must be a tensor of one dimension whose integers rise from 0 "
                    f"to {num_tokens}, the number of tokens in the row."
                )
        if len({tuple(tensor.tolist()) for tensor in given.values()}) > 1:
            raise BatchError(
                f"{' and '.join(map(repr, given))} of the batch differ. They must name the same documents."
            )
        return sorted(set(offsets))
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != (1, num_tokens):
        shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
        raise BatchError(
            "The batch does not say where documents begin: it has neither 'cu_seqlens' nor 'position_ids' of shape "
            f"(1, {num_tokens}), but tensors of shapes {shapes}. Add one of them in the collate function, as "
            "transformers' DataCollatorWithFlattening does."
        )
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    if starts[:1] != [0]:
        raise BatchError(
            f"'position_ids' of the batch begin with {int(positions[0, 0])}. Begin each document with position 0, or "
            "say with 'cu_seqlens' where documents begin."
        )
    return [*starts, num_tokens]


def _bounds(offsets: Sequence[int], number: int) -> list[int]:
    """The documents with which ``number`` microbatches begin, and the number of documents: the least sum of squares."""
    at = np.array(offsets, dtype=np.float64)
    tokens = at[None, :] - at[:, None]  # of a microbatch from one document to before another
    squares = np.where(tokens > 0, tokens**2, np.inf)
    least, begins = squares[0], []
    for _ in range(number - 1):
        sums = least[:, None] + squares
        begins.append(sums.argmin(0))
        least = sums.min(0)
    bounds = [len(offsets) - 1]
    for begin in reversed(begins):
        bounds.append(int(begin[bounds[-1]]))
    return [0, *reversed(bounds)]


def _part(batch: MutableMapping[str, Any], num_tokens: int, offsets: Sequence[int]) -> BatchPart:
    """The documents between the first and the last of ``offsets``."""
    start, size = offsets[0], offsets[-1] - offsets[0]
    longest = max(end - begin for begin, end in itertools.pairwise(offsets))

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or num_tokens not in leaf.shape:
            return leaf
        dims = [dim for dim, length in enumerate(leaf.shape) if length == num_tokens]
        if len(dims) > 1:
            raise BatchError(
                f"{name!r} of the batch has shape {tuple(leaf.shape)}, in which several dimensions are as long as the "
                f"row of {num_tokens} tokens. split_packed cuts one dimension of a tensor. Make such a mask in the "
                "step, from 'position_ids' or 'cu_seqlens'."
            )
        return leaf.narrow(dims[0], start, size).contiguous()

    part = copy.copy(batch)
    for name, value in batch.items():
        if name in _OFFSETS and value is not None:
            part[name] = torch.tensor([offset - start for offset in offsets], dtype=value.dtype, device=value.device)
        elif name in _LONGEST and value is not None:
            part[name] = torch.full_like(value, longest) if isinstance(value, Tensor) else longest
        else:
            part[name] = map_leaves(cut, value)
    return BatchPart(part, _num_samples(part, size))


def _num_samples(part: MutableMapping[str, Any], num_tokens: int) -> int:
    labels = part.get("labels")
    return max(1, int((labels != _IGNORED).sum())) if isinstance(labels, Tensor) else num_tokens
