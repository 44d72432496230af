"""Functions along dimensions that are whole: softmax, sums, norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_pp.tensor.cuts import CutError, cut_of, whole_shape
from lightning_pp.tensor.region import Region, Rule, marked, words

Arguments = tuple[Any, ...]


def along(position: int, default: Any = None) -> Rule:
    """A function with dimensions as its argument at ``position``."""

    def rule(region: Region, func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
        tensor = args[0] if args else kwargs["input"]
        cut = cut_of(tensor)
        if cut is None:
            raise CutError("has a whole tensor first and a sharded one after it", frozenset())
        dims = kwargs.get("dim", args[position] if len(args) > position else default)
        if dims is None or isinstance(dims, Tensor):
            raise CutError(f"is taken over all dimensions of {whole_shape(tensor)}, one of them sharded", cut.origins)
        dims = [dim % tensor.dim() for dim in (dims if isinstance(dims, Sequence) else [dims])]
        if cut.dim in dims or not dims:
            raise CutError(f"is taken over dimension {cut.dim} of {whole_shape(tensor)}, which is sharded", cut.origins)
        result = func(*args, **kwargs)
        first = result if isinstance(result, Tensor) else result[0]
        num_gone = sum(dim < cut.dim for dim in dims) if first.dim() < tensor.dim() else 0
        return marked(result, cut.at(cut.dim - num_gone))

    return rule


def norm(region: Region, func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """``layer_norm`` and ``rms_norm``, whose weights get the sum of the gradients of all parts."""
    tensor, shape = args[0] if args else kwargs["input"], kwargs.get("normalized_shape", args[1:2])
    cut = cut_of(tensor)
    num_dims = len(shape[0]) if args[1:2] else len(shape)
    if cut is None or cut.dim >= tensor.dim() - num_dims:
        origins = cut.origins if cut else frozenset()
        raise CutError(f"normalizes over a sharded dimension of {whole_shape(tensor)}", origins)

    def fitted(value: Any) -> Any:
        return region.copied(value) if isinstance(value, Tensor) and value is not tensor else value

    result = func(*(fitted(each) for each in args), **{name: fitted(each) for name, each in kwargs.items()})
    return marked(result, cut)


_REDUCTIONS = words("""
softmax log_softmax sum mean prod amax amin max min argmax argmin logsumexp var std norm cumsum cumprod sort argsort
any all flip softmin nansum count_nonzero
""")

RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCTIONS, along(1)),
    "normalize": along(2, 1),
    "topk": along(2, -1),
    "sort": along(1, -1),
    "argsort": along(1, -1),
    "layer_norm": norm,
    "rms_norm": norm,
}
