"""Batches whose rows refer to each other, as graphs do: cut along dimension 0, they would say something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pp.errors import BatchError
from lightning_pp.split.data.microbatch import (
    BatchDim,
    batch_size_of,
    described,
    dims_of_samples,
    lengths_of,
    num_listed_samples,
    placed_tensors,
)
from lightning_pp.split.data.tree import path_of

_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})
# sources and targets; corners of triangles
_SIDES = (2, 3)


def refuse_row_references(batch: Any, num_samples: int, num_microbatches: int, batch_dim: BatchDim = None) -> None:
    """Raises :class:`BatchError` for tensors that, by their values, point into rows of tensors of another length.

    Tensors of ``num_samples`` rows are about to be cut, and the others go whole to every microbatch. That is right for
    class weights, masks and positions. It is wrong

    * where a tensor that goes whole names rows of those that are cut: integers of shape ``(2, E)`` or ``(E, 2)`` (3 as
      well), or several tensors of integers of one other length, all from 0 to ``num_samples - 1``, and some above the
      rows of the first microbatch (edges);
    * where a tensor numbers the rows of one of another length: integers that begin at 0, stay or rise by one from row
      to row, and end at the last row of the other (the graph that each node belongs to);
    * where a tensor that goes whole has the places at which the rows that are cut begin: integers that begin at 0, do
      not fall, and end at ``num_samples`` (offsets of packed sequences);
    * where the integers of a tensor that is cut add up to the rows of integers that go whole (the targets of all
      samples one after the other, and their lengths).

    A batch with a list that has an entry per sample (detection targets) is not looked at, nor are tensors that
    ``batch_dim`` names.
    """
    if num_listed_samples(batch) is not None:
        return
    placed, dims = placed_tensors(batch).items(), dims_of_samples(batch, batch_dim)
    tensors = {place: each for place, each in placed if each.layout is torch.strided and id(each) not in dims}
    if all(tensor.shape[0] == num_samples for tensor in tensors.values()):
        return
    for place, tensor in tensors.items():
        finding = _reference(tensor, place, tensors, num_samples, num_microbatches)
        if finding:
            raise BatchError(
                f"The batch's tensors differ in length along dimension 0 ({described(lengths_of(batch))}), and some "
                f"seem to refer to rows of others: {place}, of shape {tuple(tensor.shape)}, {finding}. Cutting the "
                f"tensors of {num_samples} rows into {num_microbatches} microbatches would break such references, "
                "since the others go whole to each microbatch. Give PipelineParallelStrategy(split_batch=...) a "
                f"function that cuts such a batch, or set num_microbatches=1.{other_dims(batch, batch_dim)}"
            )


def _reference(
    tensor: Tensor, place: str, tensors: dict[str, Tensor], num_samples: int, num_microbatches: int
) -> str | None:
    """What ``tensor`` says of rows of others, if it does."""
    if tensor.dtype not in _INTEGERS or tensor.numel() < 2:
        return None
    is_whole = tensor.shape[0] != num_samples
    if is_whole and _may_be_edges(tensor, tensors) and _names_rows(tensor, num_samples, num_microbatches):
        return f"holds integers up to {int(tensor.max())}, like indices of the {num_samples} rows of other tensors"
    if tensor.dim() == 1 and not is_whole and bool((tensor >= 0).all()):
        total = int(tensor.sum())
        for other, held in tensors.items():
            is_list = held.dim() == 1 and held.shape[0] == total > num_samples and held.dtype in _INTEGERS
            if is_list and not bool((held.diff() == 1).all()):  # nor positions
                return (
                    f"adds up to {total}, like lengths of samples that stand one after the other in {other} (pad those "
                    "to a row for each sample)"
                )
    if tensor.dim() != 1 or int(tensor[0]) != 0:
        return None
    last, steps = int(tensor[-1]), tensor.diff()
    if is_whole and last == num_samples and bool((steps >= 0).all()):
        return f"rises from 0 to {num_samples}, like positions in the {num_samples} rows of other tensors"
    numbered = [
        other
        for other, held in tensors.items()
        if held.shape[0] == last + 1 != tensor.shape[0] and (is_whole == (held.shape[0] == num_samples))
    ]
    if last > 0 and numbered and bool(((steps == 0) | (steps == 1)).all()):
        return f"counts up from 0 to {last}, like numbers of the {last + 1} rows of {numbered[0]}"
    return None


def _may_be_edges(tensor: Tensor, tensors: dict[str, Tensor]) -> bool:
    if tensor.dim() == 2:
        return tensor.shape[0] in _SIDES or tensor.shape[1] in _SIDES
    alike = [other for other in tensors.values() if other.shape == tensor.shape and other.dtype == tensor.dtype]
    return tensor.dim() == 1 and len(alike) > 1 and not bool((tensor.diff() == 1).all())  # nor positions


def _names_rows(tensor: Tensor, num_samples: int, num_microbatches: int) -> bool:
    least, most = (int(value) for value in torch.aminmax(tensor))
    return least >= 0 and -(-num_samples // num_microbatches) <= most < num_samples


def other_dims(batch: Any, batch_dim: BatchDim) -> str:
    """What to do where samples lie along another dimension than 0; empty if no other has as many entries."""
    number, named = batch_size_of(batch, batch_dim), dims_of_samples(batch, batch_dim)
    texts, found = [], []
    for place, tensor in placed_tensors(batch).items():
        dims = [str(dim) for dim, size in enumerate(tensor.shape) if dim > 0 and size == number]
        if dims and id(tensor) not in named:
            texts.append(f"{place}, of shape {tuple(tensor.shape)},")
            found.append(f"{path_of(place)!r}: {' or '.join(dims)}")
    if not texts:
        return ""
    return (
        f" If the samples of {' and of '.join(texts)} lie along another dimension than 0, give "
        f"PipelineParallelStrategy(batch_dim={{{', '.join(found)}}})."
    )
