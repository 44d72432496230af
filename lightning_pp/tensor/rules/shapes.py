"""Functions that split, join and reshape tensors, with the sizes of whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_pp.tensor.cuts import Cut, CutError, cut_of, mark, reshaped, taken, whole_shape
from lightning_pp.tensor.region import Region, Rule, cuts_of, marked, words
from lightning_pp.tensor.rules.elementwise import fit_all, position_of

Arguments = tuple[Any, ...]
Function = Callable[..., Any]


def _sizes(args: Sequence[Any], kwargs: dict[str, Any], *names: str) -> list[int]:
    """Sizes given one by one, as one sequence, or by name."""
    for name in names:
        if name in kwargs:
            return list(kwargs[name])
    given = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    return list(given)


def _first(args: Arguments, kwargs: dict[str, Any]) -> tuple[Tensor, Cut]:
    tensor = args[0] if args else kwargs["input"]
    cut = cut_of(tensor)
    if cut is None:
        found = cuts_of(args, kwargs)
        raise CutError("has a whole tensor first and a sharded one after it", found[0][1].origins)
    return tensor, cut


def _argument(args: Arguments, kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else default)


def shape(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``shape`` and ``size``."""
    sizes = torch.Size(whole_shape(args[0]))
    dim = _argument(args, kwargs, 1, "dim") if func.__name__ == "size" else None
    return sizes if dim is None else sizes[dim]


def length(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``len`` and ``numel``."""
    sizes = whole_shape(args[0])
    return sizes[0] if func.__name__ == "__len__" else math.prod(sizes)


def reshape(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``view`` and ``reshape``."""
    tensor, cut = _first(args, kwargs)
    after = _sizes(args[1:], kwargs, "shape", "size", "dtype") if not isinstance(args[-1], torch.dtype) else None
    if after is None:
        raise CutError("views bits as another dtype", cut.origins)
    return _reshaped(region, func, tensor, cut, after)


def reshape_as(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``view_as`` and ``reshape_as``."""
    tensor, cut = _first(args, kwargs)
    return _reshaped(region, Tensor.reshape, tensor, cut, whole_shape(_argument(args, kwargs, 1, "other")))


def flatten(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``flatten``."""
    tensor, cut = _first(args, kwargs)
    sizes = whole_shape(tensor)
    first = _argument(args, kwargs, 1, "start_dim", 0) % len(sizes)
    last = _argument(args, kwargs, 2, "end_dim", -1) % len(sizes)
    after = [*sizes[:first], math.prod(sizes[first : last + 1]), *sizes[last + 1 :]]
    return _reshaped(region, Tensor.reshape, tensor, cut, after)


def unflatten(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``unflatten``."""
    tensor, cut = _first(args, kwargs)
    sizes = whole_shape(tensor)
    dim, parts = _argument(args, kwargs, 1, "dim") % len(sizes), list(_argument(args, kwargs, 2, "sizes"))
    known = math.prod(size for size in parts if size != -1)
    parts = [sizes[dim] // known if size == -1 else size for size in parts]
    return _reshaped(region, Tensor.reshape, tensor, cut, [*sizes[:dim], *parts, *sizes[dim + 1 :]])


def _reshaped(region: Region, func: Function, tensor: Tensor, cut: Cut, after: list[int]) -> Tensor:
    before = whole_shape(tensor)
    if -1 in after:
        known = math.prod(size for size in after if size != -1)
        after = [math.prod(before) // (known or 1) if size == -1 else size for size in after]
    if math.prod(before) != math.prod(after):
        raise CutError(f"reshapes {before} to {after}, which has another number of elements", cut.origins)
    moved = reshaped(cut, before, after, region.num_ranks)
    after[moved.dim] //= region.num_ranks
    return mark(func(tensor, after), moved)


def transpose(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Functions that put dimensions in another order."""
    tensor, cut = _first(args, kwargs)
    others = tuple(tuple(each) if isinstance(each, list) else each for each in args[1:])
    options = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in kwargs.items() if k != "input")
    return marked(func(*args, **kwargs), cut.at(_order(func, tensor.dim(), others, options).index(cut.dim)))


@lru_cache(maxsize=1024)
def _order(func: Function, num_dims: int, args: Arguments, kwargs: Any) -> tuple[int, ...]:
    """Which dimension is at each place of a result: sizes that differ say it, on a tensor without data."""
    sizes = [2 + dim for dim in range(num_dims)]
    return tuple(size - 2 for size in func(torch.empty(sizes, device="meta"), *args, **dict(kwargs)).shape)


def unsqueeze(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``unsqueeze``."""
    tensor, cut = _first(args, kwargs)
    dim = _argument(args, kwargs, 1, "dim") % (tensor.dim() + 1)
    return marked(func(*args, **kwargs), cut.at(cut.dim + (dim <= cut.dim)))


def squeeze(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``squeeze``, by whole sizes."""
    tensor, cut = _first(args, kwargs)
    given = _argument(args, kwargs, 1, "dim")
    dims = range(tensor.dim()) if given is None else [given] if isinstance(given, int) else given
    gone = tuple(d % tensor.dim() for d in dims if whole_shape(tensor)[d] == 1)
    return mark(torch.squeeze(tensor, gone), cut.at(cut.dim - sum(dim < cut.dim for dim in gone)))


def expand(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``expand``, ``expand_as`` and ``broadcast_to``."""
    tensor, cut = _first(args, kwargs)
    if func.__name__ == "expand_as":
        sizes = whole_shape(_argument(args, kwargs, 1, "other"))
    else:
        sizes = _sizes(args[1:], kwargs, "size")
    dim = cut.dim + len(sizes) - tensor.dim()
    if sizes[dim] not in (-1, cut.size):
        raise CutError(f"expands {whole_shape(tensor)} to {sizes}", cut.origins)
    sizes[dim] = tensor.shape[cut.dim]
    return mark(tensor.expand(sizes), cut.at(dim))


def repeat(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``repeat``."""
    tensor, cut = _first(args, kwargs)
    counts = _sizes(args[1:], kwargs, "repeats")
    dim = cut.dim + len(counts) - tensor.dim()
    return marked(tensor.repeat(counts), cut.at(dim, cut.segments * counts[dim]))


def repeat_interleave(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``repeat_interleave`` by one number."""
    tensor, cut = _first(args, kwargs)
    count, dim = _argument(args, kwargs, 1, "repeats"), _argument(args, kwargs, 2, "dim")
    if not isinstance(count, int) or dim is None:
        raise CutError("repeats elements by a tensor, or of a flattened tensor", cut.origins)
    factor = count if dim % tensor.dim() == cut.dim else 1
    return marked(func(*args, **kwargs), cut.at(cut.dim, [size * factor for size in cut.segments]))


def _run(region: Region, tensor: Tensor, cut: Cut, start: int, stop: int) -> Tensor:
    """``[start, stop)`` of the cut dimension."""
    local, rest = taken(cut, start, stop, region.num_ranks)
    return mark(tensor.narrow(cut.dim, local, rest.size // region.num_ranks), rest)


def split(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``split``, ``split_with_sizes``, ``chunk`` and ``tensor_split`` by numbers."""
    tensor, cut = _first(args, kwargs)
    name = func.__name__
    dim = _argument(args, kwargs, 2, "dim", 0) % tensor.dim()
    if dim != cut.dim:
        return marked(func(*args, **kwargs), cut)
    names = ("split_size_or_sections", "split_size", "split_sizes", "chunks", "sections", "indices_or_sections")
    count: Any = next((kwargs[key] for key in names if key in kwargs), args[1] if len(args) > 1 else None)
    if name == "chunk" or name == "tensor_split":
        if not isinstance(count, int) or cut.size % count:
            raise CutError(f"splits a sharded dimension of {cut.size} by {count}", cut.origins)
        count = cut.size // count
    if isinstance(count, int):
        count = [min(count, cut.size - start) for start in range(0, cut.size, count)]
    ends = [0]
    for size in count:
        ends.append(ends[-1] + size)
    try:
        return tuple(_run(region, tensor, cut, a, b) for a, b in pairwise(ends))
    except CutError as error:
        error.segments = tuple((end, cut.size) for end in ends)
        raise


def unbind(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``unbind``, ``select`` and iteration."""
    tensor, cut = _first(args, kwargs)
    dim = _argument(args, kwargs, 1, "dim", 0) % tensor.dim()
    if dim == cut.dim:
        _refuse_pick(cut)
    return marked(func(*args, **kwargs), cut.at(cut.dim - (dim < cut.dim)))


def _refuse_pick(cut: Cut) -> None:
    fractions = tuple((i, cut.size) for i in range(cut.size + 1))
    raise CutError(f"picks single indices of a sharded dimension of {cut.size}", cut.origins, fractions)


def narrow(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``narrow``."""
    tensor, cut = _first(args, kwargs)
    dim, start = _argument(args, kwargs, 1, "dim") % tensor.dim(), _argument(args, kwargs, 2, "start")
    if dim != cut.dim:
        return marked(func(*args, **kwargs), cut)
    return _run(region, tensor, cut, start, start + _argument(args, kwargs, 3, "length"))


def getitem(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Indexing by numbers, slices, None and the ellipsis; or the first dimension by numbers in a tensor."""
    tensor, index = args
    cut = cut_of(tensor)
    if cut is None:
        raise CutError("indexes a whole tensor by a sharded one", cuts_of((index,), {})[0][1].origins)
    if isinstance(index, Tensor) and index.dtype is torch.int64 and cut.dim > 0:
        return mark(func(tensor, index), cut.at(cut.dim - 1 + index.dim()))
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(entry is None or entry is Ellipsis or isinstance(entry, (int, slice)) for entry in entries):
        raise CutError("indexes a sharded tensor by a tensor or a list", cut.origins)
    num_used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    filled = [slice(None)] * (tensor.dim() - num_used)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[at : at + 1] = filled
    dim = after = 0
    for i, entry in enumerate(entries):
        if entry is not None:
            if dim == cut.dim:
                if isinstance(entry, int):
                    _refuse_pick(cut)
                start, stop, step = entry.indices(cut.size)
                if step != 1:
                    if start >= step or stop != cut.size or any(n % (step * region.num_ranks) for n in cut.segments):
                        raise CutError(f"takes every {step}th index of a sharded dimension", cut.origins)
                    tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
                    tensor, entries[i] = mark(tensor, cut.at(dim, [n // step for n in cut.segments])), slice(None)
                elif (start, stop) != (0, cut.size):
                    tensor, entries[i] = _run(region, tensor, cut, start, stop), slice(None)
                break
            dim += 1
        after += not isinstance(entry, int)
    moved = cut_of(tensor)
    assert moved is not None
    return marked(func(tensor, tuple(entries)), moved.at(after))


def cat(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``cat``: along the cut dimension the segments are joined."""
    tensors = [each for each in _argument(args, kwargs, 0, "tensors") if each.dim() > 1 or each.numel()]
    found = cuts_of(tensors, {})
    position, cut = position_of(found)
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0)) % tensors[0].dim()
    if dim != cut.dim:
        tensors = [region.fitted(each, position, cut) for each in tensors]
        return marked(torch.cat(tensors, dim), cut)
    segments: list[int] = []
    for i, each in enumerate(tensors):
        own = cut_of(each)
        if own is None:
            tensors[i], own = region.part(each, dim, [each.shape[dim]], cut.origins), cut.at(dim, [each.shape[dim]])
        if own.dim != dim:
            raise CutError("joins tensors sharded in different dimensions", cut.origins | own.origins)
        segments += own.segments
    return marked(torch.cat(tensors, dim), cut.at(dim, segments))


def stack(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``stack``."""
    tensors = _argument(args, kwargs, 0, "tensors")
    position, cut = position_of(cuts_of(tensors, {}))
    (fitted,), _ = fit_all(region, (tensors,), {}, position, cut)
    dim = _argument(args, kwargs, 1, "dim", 0) % (fitted[0].dim() + 1)
    own = fitted[0].dim() - position
    return marked(torch.stack(fitted, dim), cut.at(own + (dim <= own)))


RULES: dict[str, Rule] = {
    **dict.fromkeys(["shape.__get__", "size"], shape),
    **dict.fromkeys(["__len__", "numel", "nelement"], length),
    **dict.fromkeys(["view", "reshape"], reshape),
    **dict.fromkeys(["view_as", "reshape_as"], reshape_as),
    "flatten": flatten,
    "unflatten": unflatten,
    **dict.fromkeys(
        words("transpose permute movedim moveaxis swapaxes swapdims t T.__get__ mT.__get__ H.__get__ adjoint"),
        transpose,
    ),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], expand),
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(["split", "split_with_sizes", "chunk", "tensor_split"], split),
    **dict.fromkeys(["unbind", "select", "__iter__"], unbind),
    "narrow": narrow,
    "__getitem__": getitem,
    **dict.fromkeys(["cat", "concat", "concatenate"], cat),
    "stack": stack,
}
