"""Products: by weights that are cut by columns or by rows, and of activations with one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pp.split._torch_private import GROUPED_PRODUCT
from lightning_pp.split.head.cross_entropy import check_classes
from lightning_pp.tensor.cuts import Cut, CutError, cut_of, mark, whole_shape
from lightning_pp.tensor.functions import move
from lightning_pp.tensor.region import Region, Rule, cuts_of, origins_of

Arguments = tuple[Any, ...]
Function = Callable[..., Any]
Multiply = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]

_linear, _matmul, _mm, _addmm = F.linear, torch.matmul, torch.mm, torch.addmm


def linear(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``F.linear``: the weight's rows are the columns of its output."""

    def bound(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(region, input, weight, bias, lambda x, w, b: region.call(_linear, x, w, b), 0)

    return bound(*args, **kwargs)


def addmm(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``torch.addmm(bias, x, weight)``, as in ``Conv1D`` of GPT-2."""
    if kwargs or len(args) != 3 or args[0].dim() != 1:
        if not cuts_of(args, kwargs):
            return region.call(func, *args, **kwargs)
        raise CutError("has other arguments than a bias of one dimension and two matrices", origins_of(args, kwargs))

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = region.call(_mm, x, weight) if bias is None else region.call(_addmm, bias, x, weight)
        return result

    return product(region, args[1], args[2], args[0], multiply, 1)


def product(region: Region, x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Multiply, out_dim: int) -> Tensor:
    """A product of ``x`` with a matrix.

    Args:
        region: The region.
        x: Its last dimension is multiplied.
        weight: The matrix.
        bias: Added once.
        multiply: Computes it on one device, without a bias if that is None.
        out_dim: The dimension of ``weight`` that is the last one of the result; the other is multiplied.
    """
    if region.adopt is not None:
        weight, bias = region.adopt(weight, bias, x, out_dim)
    own, last = cut_of(weight), x.dim() - 1
    cut = cut_of(x)
    if own is None:
        if cut is None:
            return multiply(x, weight, bias)
        if cut.dim == last:
            raise CutError(
                f"multiplies an input of shape {whole_shape(x)} that is sharded in its last dimension by a weight of "
                f"shape {list(weight.shape)} that is not sharded by rows",
                cut.origins,
            )
        return mark(multiply(x, region.copied(weight), None if bias is None else region.copied(bias)), cut)
    if own.dim == out_dim:
        if cut is not None and cut.tokens:
            x, cut = region.gathered(x, sums=True), None
        elif cut is None:
            x = region.copied(x)
        else:
            raise CutError(
                f"multiplies an input that is sharded in dimension {cut.dim} of {whole_shape(x)} by a weight that is "
                "sharded by columns",
                cut.origins | own.origins,
            )
        if bias is not None and cut_of(bias) is None:
            bias = region.part(bias, 0, own.segments)
        return mark(multiply(x, weight, bias), Cut(last, own.segments, own.origins))
    if cut is None:
        x = region.part(x, last, own.segments)
    elif cut.dim != last or cut.segments != own.segments:
        raise CutError(
            f"multiplies an input of shape {whole_shape(x)}, sharded in dimension {cut.dim} (segments "
            f"{list(cut.segments)}), by a weight sharded by rows (segments {list(own.segments)})",
            cut.origins | own.origins,
        )
    partial = multiply(x, weight, None)
    tokens = region.token_dim(partial)
    if tokens is None:
        total = region.summed(partial)
        return total if bias is None else total + bias.to(total.dtype)
    total = move(partial, "scatter", "join", region.group, tokens, (partial.shape[tokens],))
    total = total if bias is None else total + region.copied(bias).to(total.dtype)
    return mark(total, Cut(tokens, (partial.shape[tokens],), frozenset(), tokens=True))


def matmul(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``matmul``, ``mm`` and ``bmm``."""
    a, b = (*args, *kwargs.values())
    if b.dim() == 2 and not (cut_of(b) is None and a.dim() == 2 and cut_of(a) is not None and region.adopt is None):
        return product(region, a, b, None, lambda x, w, _: region.call(func, x, w), 1)
    found_a, found_b = cut_of(a), cut_of(b)
    if region.adopt is not None:
        region.adopt(a, None, b, 1)
        region.adopt(b, None, a, 1)
    if found_a is None and found_b is None:
        return region.call(func, a, b)
    origins = origins_of((a, b), {})
    if a.dim() < 2 or b.dim() < 2:
        raise CutError("multiplies a sharded tensor by a vector", origins)
    # counted from the last dimension as 1
    at_a, at_b = (None if found is None else each.dim() - found.dim for each, found in ((a, found_a), (b, found_b)))
    # a cut of a batch or of heads comes before one of what is multiplied
    cut = found_a if found_a and (at_a or 0) >= (at_b or 0) else found_b
    assert cut is not None
    cut = replace(cut, origins=origins if at_a == at_b or not (at_a and at_b) else cut.origins)
    if (at_a == 1 or at_b == 2) and max(at_a or 0, at_b or 0) < 3:
        return region.summed(region.call(func, region.fitted(a, 1, cut), region.fitted(b, 2, cut)))
    position = max(at_a or 0, at_b or 0)
    if position > 2:
        a, b = region.fitted(a, position, cut), region.fitted(b, position, cut)
    elif found_a is not None and found_b is not None:
        raise CutError("multiplies tensors that are both sharded, in dimensions that do not match", origins)
    else:
        a, b = region.copied(a), region.copied(b)
    result = region.call(func, a, b)
    return mark(result, cut.at(result.dim() - position))


def grouped(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Products of groups of rows, each with a matrix of its own: ``x`` [rows, k] and ``weight`` [groups, k, n]."""

    def bound(x: Tensor, weight: Tensor, offs: Tensor, **options: Any) -> Any:
        if region.adopt is not None:
            region.adopt(weight, None, x, 2)
        cut, own = cut_of(x), cut_of(weight)
        options = {name: value for name, value in options.items() if value is not None} | {"offs": offs}
        if cut is None and own is None:
            return region.call(func, x, weight, **options)
        origins = origins_of((x, weight), {})
        if own is None or own.dim == 0 or cut_of(offs) is not None or (cut is not None and own.dim == 2):
            raise CutError("multiplies groups of rows and matrices whose parts do not match", origins)
        if own.dim == 2:
            return mark(region.call(func, region.copied(x), weight, **options), own.at(1))
        return region.summed(region.call(func, region.fitted(x, 1, own), weight, **options))

    return bound(*args, **kwargs)


def baddbmm(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``baddbmm`` of heads in a batch."""
    if len(args) != 3:
        raise CutError("has its tensors by name", origins_of(args, kwargs))
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    with region.entered_again():
        result = torch.bmm(args[1], args[2]) * alpha
        return result + args[0] * beta if beta else result


def einsum(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``einsum``: the index that is cut is cut in all operands; a sum over it is a sum over the ranks."""
    equation, operands = args[0], list(args[1]) if isinstance(args[1], (list, tuple)) else list(args[1:])
    origins = origins_of((operands,), {})
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise CutError("has an equation with dots or without an arrow", origins)
    terms, output = equation.replace(" ", "").split("->")
    letters = terms.split(",")
    (letter, cut), *others = {
        (term[found.dim], found.segments): found
        for term, each in zip(letters, operands, strict=True)
        if (found := cut_of(each)) is not None
    }.items()
    if others or any(term.count(letter[0]) > 1 for term in letters):
        raise CutError(f"sums over {equation!r}, whose operands are sharded in several indices", origins)
    fitted = []
    for term, each in zip(letters, operands, strict=True):
        at = term.find(letter[0])
        fitted.append(region.copied(each) if at < 0 else region.fitted(each, len(term) - at, cut))
    result = func(equation, *fitted)
    if letter[0] not in output:
        return region.summed(result)
    return mark(result, replace(cut, dim=output.index(letter[0]), origins=origins))


def embedding(region: Region, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """An embedding whose rows or columns are cut: the sum of the rows that each rank has, or their parts."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens, weight = given.pop("input"), given.pop("weight")
    if region.adopt is not None:
        weight, _ = region.adopt(weight, None, tokens, 1, 0)
    cut = cut_of(weight)
    if cut_of(tokens) is not None:
        raise CutError("looks up rows of which each rank has a part", origins_of(args, kwargs))
    if cut is None:
        return func(*args, **kwargs)
    if cut.dim == 1:
        result = func(tokens, weight, **given)
        return mark(result, cut.at(result.dim() - 1))
    check_classes(tokens, cut.size, torch.iinfo(tokens.dtype).min)
    num_rows, first = weight.shape[0], region.first_of(cut.segments)
    tokens, padding = tokens - first, given.pop("padding_idx", None)
    if padding is not None and 0 <= padding % cut.size - first < num_rows:
        given["padding_idx"] = padding % cut.size - first
    elsewhere = (tokens < 0) | (tokens >= num_rows)
    result = func(tokens.masked_fill(elsewhere, 0), weight, **given)
    return region.summed(result.masked_fill(elsewhere.unsqueeze(-1), 0.0))


RULES: dict[str, Rule] = {
    "linear": linear,
    "addmm": addmm,
    **dict.fromkeys(["matmul", "__matmul__", "mm", "bmm"], matmul),
    "baddbmm": baddbmm,
    **dict.fromkeys(["grouped_mm", GROUPED_PRODUCT, "grouped_mm_fallback"], grouped),
    "einsum": einsum,
    "embedding": embedding,
}
