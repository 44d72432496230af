"""Cutting a batch into microbatches along dimension 0."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_pp.errors import BatchError, ConfigurationError, enumerate_names
from lightning_pp.split.data.tree import children_of, entries_of, is_object, leaves_of, map_children, path_of

BatchDim = Mapping[str, int] | None
"""By path of a tensor, the dimension along which its samples lie."""


@dataclass(frozen=True)
class Microbatch:
    """One slice of a batch.

    Attributes:
        data: The slice, in the containers of the batch. Tensors cut along dimension 0 are views of the batch's.
        num_samples: How many samples it has.
        weight: Its share of the batch's samples; the weights of a batch's microbatches sum to 1.
    """

    data: Any
    num_samples: int
    weight: float


@dataclass(frozen=True)
class BatchPart:
    """One microbatch as a ``split_batch`` function returns it.

    Attributes:
        data: What the step is called with.
        num_samples: How many samples it stands for. Losses, outputs that are numbers and logged values of the
            microbatches are weighted by it: give the number of what your loss is a mean over (graphs, not nodes).
    """

    data: Any
    num_samples: int


SplitBatch = Callable[[Any, int], Sequence[Any]]
"""Cuts a batch into at most so many microbatches; see :func:`split_by`."""


def split_by(split: SplitBatch, batch: Any, num_microbatches: int) -> list[Microbatch]:
    """Has the user's function cut ``batch``.

    Args:
        split: Given the batch, on the device, and the largest number of microbatches. It returns 1 to that many of
            them, in the order of the batch's samples: each a :class:`BatchPart`, or just the data where all tensors in
            it have one length along dimension 0, which is then the number of samples. It must give the same on every
            rank of a pipeline, so it may draw no random numbers, and as many for equally many samples.
        batch: The batch.
        num_microbatches: The largest number of microbatches.

    Raises:
        BatchError: It returned nothing, too many, or data that do not say how many samples they are.
    """
    parts = split(batch, num_microbatches)
    name = getattr(split, "__qualname__", type(split).__name__)
    if not isinstance(parts, (list, tuple)) or not 1 <= len(parts) <= num_microbatches:
        what = (
            f"{len(parts)} parts" if isinstance(parts, (list, tuple)) else f"an object of type {type(parts).__name__}"
        )
        raise BatchError(
            f"split_batch={name} returned {what}. It must return a list of 1 to {num_microbatches} microbatches "
            "(num_microbatches), and fewer for a batch with fewer samples."
        )
    sizes = [_num_samples_of_part(part, index, name) for index, part in enumerate(parts)]
    total = sum(sizes)
    return [
        Microbatch(part.data if isinstance(part, BatchPart) else part, size, size / total)
        for part, size in zip(parts, sizes, strict=True)
    ]


def _num_samples_of_part(part: Any, index: int, name: str) -> int:
    if isinstance(part, BatchPart):
        if not isinstance(part.num_samples, int) or part.num_samples < 1:
            raise BatchError(
                f"split_batch={name} returned microbatch {index} with num_samples={part.num_samples!r}. It must be an "
                "integer of at least 1. Return fewer microbatches rather than empty ones."
            )
        return part.num_samples
    lengths = sample_lengths(part)
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise BatchError(
            f"split_batch={name} returned microbatch {index} of type {type(part).__name__}, and its number of samples "
            f"is not clear: {described(lengths) or 'it holds no tensor with a dimension 0'}. Return "
            "lightning_pp.BatchPart(data, num_samples)."
        )
    return next(iter(lengths.values()))


def placed_tensors(batch: Any) -> dict[str, Tensor]:
    """Place to tensor, for every tensor of at least one dimension in ``batch``."""
    entries = entries_of(batch, "batch")
    return {place: leaf for place, leaf in entries if isinstance(leaf, Tensor) and not leaf.is_nested and leaf.dim()}


def sample_lengths(batch: Any) -> dict[str, int]:
    """Place to length along dimension 0, for the same tensors."""
    return {place: tensor.size(0) for place, tensor in placed_tensors(batch).items()}


def described(lengths: dict[str, int]) -> str:
    """``batch['x'] has 20 rows, batch['y'] 4``."""
    places = [f"{place} {'has ' if not index else ''}{size}" for index, (place, size) in enumerate(lengths.items())]
    if places:
        places[0] += " rows"
    return enumerate_names(places, 6)


def batch_size_of(batch: Any, batch_dim: BatchDim = None) -> int | None:
    """Number of samples in ``batch``: the length along dimension 0 that most of its tensors share.

    Among equally frequent lengths the one met first counts. A list with an entry per sample (detection targets: dicts
    of the same keys, beside a list of as many images, or with tensors of different lengths) says it at once. A batch
    without tensors of at least one dimension counts the elements of its first flat list of plain values (a list of
    strings, say). ``None`` where nothing is found. Raises :class:`BatchError` if ``batch_dim`` does not fit the batch.
    """
    return _samples_of(batch, batch_dim)[0]


def _samples_of(batch: Any, batch_dim: BatchDim) -> tuple[int | None, dict[int, int]]:
    """The number of samples, and their dimension in the tensors that ``batch_dim`` names, by id."""
    dims = dims_of_samples(batch, batch_dim)
    number = num_listed_samples(batch)
    if number is None:
        tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        tensors.sort(key=lambda tensor: id(tensor) in dims)  # if lengths are equally frequent, the others decide
        lengths = Counter(tensor.size(dims.get(id(tensor), 0)) for tensor in tensors)
        lists = (len(values) for values in _lists(batch, _is_plain_list))
        number = lengths.most_common(1)[0][0] if lengths else next(lists, None)
    for place, tensor in placed_tensors(batch).items() if dims else ():
        dim = dims.get(id(tensor), 0)
        if id(tensor) in dims and tensor.size(dim) != number:
            raise BatchError(
                f"batch_dim names dimension {dim} of {path_of(place)!r}, whose shape is {tuple(tensor.shape)}. This "
                f"dimension has size {tensor.size(dim)}, but the batch has {number} samples. Name the dimension along "
                "which its samples lie."
            )
    return number, dims


def dims_of_samples(batch: Any, batch_dim: BatchDim) -> dict[int, int]:
    """By the id of each tensor that ``batch_dim`` names, the dimension along which its samples lie.

    Raises:
        BatchError: A path does not lead to a tensor that can be cut, or the tensor lacks the dimension.
    """
    dims: dict[int, int] = {}
    if not batch_dim:
        return dims
    can_be_cut = set(map(id, leaves_of(batch)))  # nothing in objects, nor in lists with an entry per sample
    if num_listed_samples(batch) is not None:
        can_be_cut -= {id(leaf) for samples in _lists(batch, _is_list_of_samples) for leaf in leaves_of(samples)}
    tensors = {place: tensor for place, tensor in placed_tensors(batch).items() if id(tensor) in can_be_cut}
    for path, dim in batch_dim.items():
        named = [tensor for place, tensor in tensors.items() if path in (place, path_of(place))]
        if len(named) != 1:
            shapes = [f"{path_of(place)!r} {tuple(tensor.shape)}" for place, tensor in tensors.items()]
            raise BatchError(
                f"batch_dim names {path!r}, but {len(named) or 'no'} tensors of the batch that can be cut have this "
                f"path. Name one of: {', '.join(shapes) or 'none'}."
            )
        shape = tuple(named[0].shape)
        if not -len(shape) <= dim < len(shape):
            raise BatchError(
                f"batch_dim names dimension {dim} of {path!r}, whose shape is {shape}. Name the dimension along which "
                f"its samples lie, from 0 to {len(shape) - 1}."
            )
        dims[id(named[0])] = dim % len(shape)
    return dims


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


def split_batch(batch: Any, num_microbatches: int, batch_dim: BatchDim = None) -> list[Microbatch]:
    """Cuts ``batch`` into at most ``num_microbatches`` slices along dimension 0.

    Every tensor whose dimension 0 has the batch's length is cut, wherever it stands in the batch's tree; so is a list
    of that length that holds only plain values. All else (scalars, masks of another shape, class weights) goes whole to
    every microbatch. In a batch with a list that has an entry per sample, the lists of that length are cut, and the
    tensors in them stay whole. Where the length is not divisible, the first slices have one sample more; where it is
    smaller than ``num_microbatches``, there are as many microbatches as samples. Tensors that ``batch_dim`` names are
    cut along the dimension that it says. A ``BlockMask`` of FlexAttention with a row for each sample is cut too.

    Raises:
        BatchError: The batch is empty, or holds data that has no dimension 0 to cut (packed, nested or sparse); or
            ``batch_dim`` does not fit it.
        ConfigurationError: ``num_microbatches`` is less than 1.
    """
    if num_microbatches < 1:
        raise ConfigurationError(f"num_microbatches={num_microbatches} is not possible; use 1 or more, or 'auto'.")
    num_samples, dims = _samples_of(batch, batch_dim)
    if num_samples is None:
        lengths = sample_lengths(batch)
        if num_microbatches > 1 and batch is not None and not isinstance(batch, (bool, int, float, str)):
            why = (
                f"keeps its tensors in attributes ({described(lengths)})"
                if lengths
                else "shows no tensor in a container or an attribute"
            )
            raise BatchError(
                f"A batch of type {type(batch).__name__} {why}, so it cannot be cut along dimension 0 into "
                f"{num_microbatches} microbatches. Return tensors (in tuples, dicts or dataclasses) from the "
                "dataloader, register the type with torch.utils._pytree, give the strategy a function that cuts it "
                "(split_batch=), or set num_microbatches=1."
            )
        return [Microbatch(batch, lengths.popitem()[1] if len(set(lengths.values())) == 1 else 1, 1.0)]
    if num_samples == 0:
        raise BatchError("The batch has 0 samples (dimension 0 of its tensors is 0); drop empty batches in the loader.")
    num_slices = min(num_microbatches, num_samples)
    if num_slices == 1:
        return [Microbatch(batch, num_samples, 1.0)]
    cut = _slicer(batch, num_samples, num_slices, dims)
    smaller, larger = divmod(num_samples, num_slices)
    sizes = [smaller + (index < larger) for index in range(num_slices)]
    return [cut(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def first_samples(batch: Any, number: int, batch_dim: BatchDim = None) -> Microbatch:
    """The first samples of ``batch``, a slice of it as :func:`split_batch` makes them.

    Raises:
        BatchError: As :func:`split_batch` says.
        ConfigurationError: The batch has fewer, or its samples cannot be counted.
    """
    num_samples, dims = _samples_of(batch, batch_dim)
    if num_samples is None or number > num_samples:
        has = "samples that cannot be counted" if num_samples is None else f"{num_samples} samples"
        raise ConfigurationError(f"microbatches of {number} samples cannot be made: the first batch has {has}")
    if number == num_samples:
        return Microbatch(batch, number, 1.0)
    return _slicer(batch, num_samples, -(-num_samples // number), dims)(0, number)


def doubled(part: Microbatch, batch_dim: BatchDim = None) -> Microbatch | None:
    """``part`` with each of its samples twice: all of them, and all again. None where they cannot be counted."""
    num_samples, dims = _samples_of(part.data, batch_dim)
    if num_samples != part.num_samples:
        return None
    has_sample_list = num_listed_samples(part.data) is not None

    def twice(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            dim = dims.get(id(tree), 0)
            return torch.cat([tree, tree], dim) if tree.dim() > 0 and tree.shape[dim] == num_samples else tree
        if _is_plain_list(tree) or (has_sample_list and _is_list_of_samples(tree)):
            return tree + tree if len(tree) == num_samples else tree
        return map_children(twice, tree)

    return Microbatch(twice(part.data), 2 * num_samples, 1.0)


def _slicer(batch: Any, num_samples: int, num_slices: int, dims: Mapping[int, int]) -> Callable[[int, int], Microbatch]:
    """What makes a slice of ``batch`` from the first sample of it and the number of its samples."""
    _refuse_uncuttable(batch, num_slices)
    _refuse_objects_with_samples(batch, num_samples, num_slices)
    has_sample_list = num_listed_samples(batch) is not None

    def slice_of(tree: Any, start: int, size: int) -> Any:
        if isinstance(tree, Tensor):
            dim = dims.get(id(tree), 0)
            if tree.dim() == 0 or tree.shape[dim] != num_samples:
                return tree
            # steps may view what is contiguous in the batch
            return tree[start : start + size] if dim == 0 else tree.narrow(dim, start, size).contiguous()
        if _is_row_mask(tree, num_samples):
            return _mask_rows(tree, start, size)
        if _is_plain_list(tree) or (has_sample_list and _is_list_of_samples(tree)):
            return tree[start : start + size] if len(tree) == num_samples else tree
        return map_children(lambda child: slice_of(child, start, size), tree)

    return lambda start, size: Microbatch(slice_of(batch, start, size), size, size / num_samples)


def _is_plain_list(tree: Any) -> bool:
    return (
        type(tree) in (list, tuple)
        and len(tree) > 0
        and all(isinstance(value, (str, bytes, bool, int, float)) for value in tree)
    )


def num_listed_samples(batch: Any) -> int | None:
    """The length of a list that has an entry per sample, if there is one.

    Two views of a batch are a list of dicts as well; but then the tensors in it have the batch's length in common.
    """
    dicts = _lists(batch, _is_dict_list)
    tensor_lists = {len(tensors) for tensors in _lists(batch, _is_tensor_list)}
    for samples in dicts:
        lengths = [[leaf.size(0) for leaf in leaves_of(s) if isinstance(leaf, Tensor) and leaf.dim()] for s in samples]
        if len(samples) in tensor_lists or any(length != lengths[0] for length in lengths):
            return len(samples)
    return None


def _is_list_of_samples(tree: Any) -> bool:
    """What has an entry per sample beside a list that is known to."""
    return _is_dict_list(tree) or _is_tensor_list(tree)


def _is_dict_list(tree: Any) -> bool:
    return (
        type(tree) in (list, tuple)
        and len(tree) > 0
        and all(isinstance(sample, dict) and sample.keys() == tree[0].keys() for sample in tree)
    )


def _is_tensor_list(tree: Any) -> bool:
    return type(tree) in (list, tuple) and len(tree) > 0 and all(isinstance(sample, Tensor) for sample in tree)


def _lists(tree: Any, is_list: Callable[[Any], bool]) -> list[Any]:
    if is_list(tree):
        return [tree]
    return [found for child in children_of(tree) for found in _lists(child, is_list)]


def _refuse_uncuttable(tree: Any, num_slices: int) -> None:
    if isinstance(tree, PackedSequence):
        raise BatchError(
            f"A PackedSequence cannot be cut into {num_slices} microbatches; pad instead, or set num_microbatches=1."
        )
    if isinstance(tree, Tensor) and (tree.is_nested or tree.layout is not torch.strided):
        raise BatchError(
            f"A tensor of layout {tree.layout}{' (nested)' if tree.is_nested else ''} cannot be cut into "
            f"{num_slices} microbatches; use a dense tensor, or set num_microbatches=1."
        )
    for child in children_of(tree):
        _refuse_uncuttable(child, num_slices)


def _is_row_mask(leaf: Any, num_samples: int) -> bool:
    """Whether ``leaf`` is FlexAttention's ``BlockMask`` with a row for each sample."""
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")  # takes long to import
    is_mask = flex_attention is not None and isinstance(leaf, flex_attention.BlockMask)
    return is_mask and leaf.kv_num_blocks.shape[0] == num_samples


def _mask_rows(mask: Any, start: int, size: int) -> Any:
    """A ``BlockMask`` of some of the rows; torch leaves out its function, which gets the numbers of all rows."""
    rows = mask[start : start + size]
    rows.mask_mod = lambda batch, head, query, key: mask.mask_mod(batch + start, head, query, key)
    return rows


def _refuse_objects_with_samples(batch: Any, num_samples: int, num_slices: int) -> None:
    """An object goes whole to every microbatch, which is wrong for one with a row per sample."""
    for leaf in leaves_of(batch):
        lengths = sample_lengths(leaf) if is_object(leaf) and not _is_row_mask(leaf, num_samples) else {}
        if num_samples in lengths.values():
            place = next(place for place, length in lengths.items() if length == num_samples)
            raise BatchError(
                f"The attribute {place.removeprefix('batch.')!r} of the {type(leaf).__name__} in the batch has "
                f"{num_samples} rows, one per sample, but such an object cannot be cut into {num_slices} microbatches. "
                "Register its type with torch.utils._pytree, make it a dataclass, give the strategy a function that "
                "cuts the batch (split_batch=), or set num_microbatches=1."
            )
