"""Compares results of parts of a batch with those of the whole, row by row or as a mean; finds the first difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_pp.split._torch_private import is_functorch_wrapped, version_of
from lightning_pp.split.comparison.auxiliary import AuxiliaryLosses, Call
from lightning_pp.split.data.tree import tensors_of
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.record.reduction import Kind
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.reductions.functions import kind_of
from lightning_pp.split.reductions.recording import tensors_given
from lightning_pp.split.reductions.scaling import degree_of, set_degree
from lightning_pp.split.unit_calls.interception import OutsideUnits, running_unit

_ORIGINS = "_pp_origins"
_TAKE_ROWS = ("__getitem__", "index_select", "take_along_dim", "gather")


def is_close(value: float, other: float, tolerance: float, *scale: float) -> bool:
    """Whether two numbers agree to ``tolerance``, relative to the largest of them and of ``scale``; NaN equals NaN."""
    if math.isnan(value) or math.isnan(other) or math.isinf(value) or math.isinf(other):
        return value == other or (math.isnan(value) and math.isnan(other))
    return abs(value - other) <= tolerance * max(abs(value), abs(other), *map(abs, scale), 1e-12)


def parts_make_whole(whole: Tensor, parts: Sequence[Tensor], weights: Sequence[float], tolerance: float) -> bool:
    """Whether ``parts`` make ``whole``: they are its rows, or their weighted mean or each of them is it.

    Each may also have several views of its rows, one after the other. True also where their shapes leave that open.
    """
    if is_fake(whole) or any(map(is_fake, parts)) or not whole.numel():
        return True
    if whole.layout is not torch.strided or any(part.layout is not torch.strided for part in parts):
        return True
    dims = {part.dim() for part in parts} | {whole.dim()}
    if len(dims) != 1:
        return True
    for dim in range(whole.dim()):
        others = [_without(part.shape, dim) == _without(whole.shape, dim) for part in parts]
        if all(others) and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            return any(_all_close(whole, rows, tolerance) for rows in _joined(parts, dim))
    if any(part.shape != whole.shape for part in parts):
        grow = [sum(part.shape[dim] for part in parts) == size for dim, size in enumerate(whole.shape)]
        return sum(grow) <= 1  # of rows beside rows nothing is said
    if not whole.is_floating_point():
        return True
    mean = sum(part.double() * weight for part, weight in zip(parts, weights, strict=True))
    assert isinstance(mean, Tensor)
    return _all_close(whole, mean, tolerance) or all(_all_close(whole, part, tolerance) for part in parts)


def _joined(parts: Sequence[Tensor], dim: int) -> Iterator[Tensor]:
    """``parts`` one after the other; and, as if each had several views of its samples, view after view."""
    sizes = [part.shape[dim] for part in parts]
    for num_views in range(1, math.gcd(*sizes) + 1):
        if not math.gcd(*sizes) % num_views:
            shapes = [(num_views, size // num_views) for size in sizes]
            views = [torch.unflatten(part, dim, shape) for part, shape in zip(parts, shapes, strict=True)]
            yield torch.cat(views, dim + 1).flatten(dim, dim + 1)


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _all_close(value: Tensor, other: Tensor, tolerance: float) -> bool:
    if not value.is_floating_point():
        return torch.equal(value, other.to(value.dtype))
    scale = float(value.detach().abs().nan_to_num().max().clamp_min(1e-12))
    return torch.allclose(value.double(), other.double(), rtol=0, atol=10 * tolerance * scale, equal_nan=True)


@dataclass
class Seen:
    """The results of one run of a step on one stage, call by call.

    Attributes:
        share: Share of the samples, with which values that grow with the batch are made to stand for all of it.
        units: Name of a unit and number of its call, to its argument and result tensors.
        functions: Outside of units: name, line, tensors given and given back of each torch function.
        moved: Names of the buffers that the step wrote into.
        auxiliary: Of a part: puts in the auxiliary losses of the whole.
        origins: Places of the functions that what differs comes from, if that is known; metrics beside it are not.
    """

    share: float = 1.0
    units: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    functions: list[Call] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    auxiliary: AuxiliaryLosses = field(default_factory=lambda: AuxiliaryLosses(()))
    origins: Set[int] = frozenset()

    def follow(self, outputs: Any) -> None:
        """Considers only what ``outputs`` depend on."""
        self.origins = _origins_of(outputs)


@contextmanager
def watched(seen: Seen, module: nn.Module, units: Mapping[str, nn.Module]) -> Iterator[None]:
    """Around one run of a step: notes in ``seen`` what units and the code between them give, and written buffers."""
    before = {name: (id(buffer), version_of(buffer)) for name, buffer in module.named_buffers()}
    names = {id(unit): name for name, unit in units.items()}
    times: dict[str, int] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            times[name] = times.get(name, -1) + 1
            seen.units[name, times[name]] = (_as_now((args, kwargs)), _as_now(output))
            seen.auxiliary.meets_rows |= seen.auxiliary.holds((args, kwargs))
            _note_origins(output, _origins_of((args, kwargs)))

    hook = register_module_forward_hook(note, with_kwargs=True)
    try:
        with _Functions(seen):
            yield
    finally:
        hook.remove()
        now = {name: (buffer, version_of(buffer)) for name, buffer in module.named_buffers()}
        seen.moved |= {name for name, (buffer, version) in now.items() if before.get(name) != (id(buffer), version)}


class _Functions(OutsideUnits):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tensors = kwargs or {}, list(tensors_given(args, kwargs or {}))
        # within torch.func.vmap a tensor has no values to compare
        if running_unit() or kind_of(func) is Kind.READING or any(map(is_functorch_wrapped, tensors)):
            return func(*args, **kwargs)
        name, given = getattr(func, "__name__", str(func)), _as_now(tensors)
        results: list[Tensor] = []  # stays empty if the stage ends with this function
        origins = _origins_of((args, kwargs)) | {len(self._seen.functions)}
        self._seen.functions.append((name, user_line(), given, results))
        result = self._seen.auxiliary.run(func, name, args, kwargs)
        results += _as_now(result)
        _note_origins(tensors if result is None else result, origins)  # None: written into what it was given
        return result


def _origins_of(tree: Any) -> frozenset[int]:
    """The functions between units that the tensors in ``tree`` depend on, by their places."""
    return frozenset[int]().union(*(getattr(tensor, _ORIGINS, ()) for tensor in tensors_of(tree)))


def detached(leaf: Any) -> Any:
    """``leaf``; if it is a tensor, without its graph, and with its origins."""
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = leaf.detach()
    if hasattr(leaf, _ORIGINS):
        setattr(tensor, _ORIGINS, getattr(leaf, _ORIGINS))
    return tensor


def _note_origins(tree: Any, origins: frozenset[int]) -> None:
    for tensor in tensors_of(tree):
        setattr(tensor, _ORIGINS, origins)


def _as_now(tree: Any) -> list[Tensor]:
    """Copies of the tensors in ``tree``, which the step may write into later."""
    copies = []
    for tensor in tensors_of(tree):
        copies.append(tensor.detach().clone())
        set_degree(copies[-1], degree_of(tensor))
    return copies


def _of_whole(tensors: Sequence[Tensor], share: float) -> list[Tensor]:
    """``tensors`` of a part, scaled to the whole if they grow with the batch."""
    return [tensor if not degree_of(tensor) else tensor * share ** -degree_of(tensor) for tensor in tensors]


@dataclass(frozen=True)
class Culprit:
    """The first place where samples are coupled.

    Attributes:
        unit: The unit that couples them; None: the code between units.
        times: The how-manieth of its calls.
        function: The torch function that couples them.
        line: The user's line.
        at_end: Whether only the last stage runs that code.
    """

    unit: str | None
    times: int = 0
    function: str = ""
    line: str = ""
    at_end: bool = True


def first_culprit(whole: Seen, parts: Sequence[Seen], weights: Sequence[float], tolerance: float) -> Culprit | None:
    """Where, of what ran here, parts that agreed with the whole gave something that does not."""
    for key, (_, after) in whole.units.items():
        of_parts = [part.units[key] for part in parts if key in part.units]
        if len(of_parts) == len(parts):
            if not _all_make_whole(whole.units[key][0], [given for given, _ in of_parts], weights, tolerance):
                break
            if not _all_make_whole(after, [result for _, result in of_parts], weights, tolerance):
                return Culprit(*key)
    if any(len(part.functions) != len(whole.functions) for part in parts):
        return None
    for place, (name, line, given, results) in enumerate(whole.functions):
        others = [(part.functions[place], part.share) for part in parts]
        if whole.origins and place not in whole.origins:
            continue
        if any(other[0] != name for other, _ in others):
            return None
        of_given = [_of_whole(other[2], share) for other, share in others]
        of_results = [_of_whole(other[3], share) for other, share in others]
        if name in _TAKE_ROWS:  # a step that makes the places itself makes others for a part
            given, of_given = given[:1], [each[:1] for each in of_given]
        # what is given no tensors (arange) couples no samples
        before = given and _all_make_whole(given, of_given, weights, tolerance)
        if before and not _all_make_whole(results, of_results, weights, tolerance):
            return Culprit(None, function=name, line=line)
    return None


def are_only_losses(whole: Seen, parts: Sequence[Seen], weights: Sequence[float]) -> bool:
    """Whether the auxiliary losses meet no rows, and are products of means that add up where they are products."""
    for place in set().union(*(part.auxiliary.products for part in parts)):
        of_given = [_of_whole(part.functions[place][2], part.share) for part in parts]
        if not _all_make_whole(whole.functions[place][2], of_given, weights, 1e-3):
            return False
    return not any(part.auxiliary.meets_rows for part in parts)


def _all_make_whole(
    whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], weights: Sequence[float], tolerance: float
) -> bool:
    if any(len(part) != len(whole) for part in parts):
        return True
    return all(
        parts_make_whole(tensor, of_parts, weights, tolerance) for tensor, *of_parts in zip(whole, *parts, strict=True)
    )
