"""The torch functions that matter to how a value grows with the batch, told by their names.

Names, because a :class:`torch.overrides.TorchFunctionMode` sees one operation under several objects: ``x.sum()``,
``torch.sum(x)`` and ``from torch import sum`` are ``sum``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split.fakes.parameters import has_data
from lightning_pp.split.record.reduction import Kind


def _with_variants(*names: str) -> tuple[str, ...]:
    """The names, and those of the same in place and as operators."""
    return tuple(variant for name in names for variant in (name, f"{name}_", f"__{name}__", f"__i{name}__"))


SCATTERS = ("scatter_add", "scatter_add_", "index_add", "index_add_")
"""Sums that are added to their first argument."""
_NAMES: Mapping[Kind, tuple[str, ...]] = {
    Kind.SUM: ("sum", "nansum", "count_nonzero", "bincount", "histc", *SCATTERS),
    Kind.CONTRACTION: (
        "matmul", "mm", "mv", "bmm", "dot", "vdot", "inner", "einsum", "tensordot", "__matmul__", "__rmatmul__",
    ),
    Kind.MEAN: ("mean",),
    Kind.EXTREME: ("max", "min", "amax", "amin", "any", "all"),
    Kind.PRODUCT: (*_with_variants("mul", "multiply"), "__rmul__"),
    Kind.QUOTIENT: (*_with_variants("div", "divide", "true_divide", "truediv"), "__rdiv__", "__rtruediv__"),
    Kind.ADDITION: (*_with_variants("add", "sub", "subtract"), "__radd__", "__rsub__", "rsub"),
    Kind.NUMBER: ("tensor", "as_tensor", "scalar_tensor", "full", "new_tensor", "new_full"),
    Kind.LINEAR: (
        "neg", "__neg__", "negative", "detach", "clone", "to", "float", "double", "half", "bfloat16", "type", "type_as",
        "contiguous", "view", "reshape", "squeeze", "unsqueeze", "flatten", "unflatten", "ravel", "expand", "expand_as",
        "transpose", "permute", "swapaxes", "movedim", "t", "__getitem__", "select", "narrow", "index_select",
        "gather", "take", "split", "chunk", "unbind", "cpu", "cuda", "stack", "cat", "concat", "concatenate", "hstack",
        "nan_to_num", "broadcast_to", "repeat", "tile", "flip", "roll", "diagonal", "trace", "conj", "real",
        "zeros_like",
    ),
    Kind.READING: (
        "__get__", "__set__", "__delete__", "item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__",
        "__index__", "__complex__", "__format__", "__repr__", "__str__", "__len__", "__hash__", "__iter__",
        "__reversed__", "__dir__", "__deepcopy__", "__reduce_ex__", "size", "stride", "dim", "ndimension", "numel",
        "nelement", "element_size", "get_device", "is_floating_point", "is_complex", "is_contiguous", "register_hook",
        "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "detach_", "backward", "data_ptr",
        "storage_offset", "untyped_storage", "is_same_size", "is_tensor", "is_grad_enabled", "get_default_dtype",
    ),
}  # fmt: skip
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
GREATEST = ("max", "amax", "any")
"""Extremes that are the greatest."""
REVERSED = ("__rdiv__", "__rtruediv__")
"""Quotients whose first argument is what is divided by."""

MAKES_THE_SAME: frozenset[str] = frozenset().union(
    _NAMES[Kind.LINEAR],
    ("pad", "where", "masked_fill", "long", "int", "bool", "clamp", "logical_and", "logical_or", "logical_not"),
    ("__and__", "__or__", "__invert__", "bitwise_and", "bitwise_or", "bitwise_not"),
    (variant for name in ("eq", "ne", "lt", "le", "gt", "ge") for variant in (name, f"__{name}__")),
)
"""Functions that give the same for the same arguments, and write into none of them."""
WRITES_INTO_FIRST = frozenset({"__setitem__", "masked_fill_"})
"""Functions that write into their first argument what the others say."""

_BY_TARGET = ("cross_entropy", "nll_loss")
_BY_ELEMENT = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "poisson_nll_loss"),
    *("gaussian_nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
_AVERAGES = ("mean", "batchmean", "elementwise_mean")


@cache
def kind_of(function: Callable[..., Any]) -> Kind | None:
    """What ``function`` does; None: it is none of those that matter, and takes values of degree 0."""
    kind = _KINDS.get(getattr(function, "__name__", ""))
    if kind is None and signature_with_reduction(function) is not None:
        return Kind.LOSS
    return kind


def kind_of_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind | None:
    """What this call of it does: a norm with the exponent 1 is a sum."""
    is_norm = function.__name__ in ("norm", "linalg_vector_norm")
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    return Kind.SUM if is_norm and isinstance(order, (int, float)) and order == 1 else kind_of(function)


@cache
def signature_with_reduction(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a loss of ``torch.nn.functional``; None where it has no ``reduction``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins
        return None
    return signature if "reduction" in signature.parameters else None


class LossCall:
    """A call of a loss of ``torch.nn.functional``."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        signature = signature_with_reduction(function)
        assert signature is not None
        self._function = function
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self._given: dict[str, Any] = bound.arguments
        self.reduction: str = self._given["reduction"]
        if self._given.get("size_average") is not None or self._given.get("reduce") is not None:
            reduced = "sum" if self._given.get("size_average") is False else "mean"
            self.reduction = "none" if self._given.get("reduce") is False else reduced

    @property
    def is_mean(self) -> bool:
        """Whether it divides by something."""
        return self.reduction in _AVERAGES

    @property
    def is_counted_by_target(self) -> bool:
        """Whether what it divides by depends on the values of its target."""
        return self._function.__name__ in _BY_TARGET and not self._target().is_floating_point()

    @property
    def is_countable(self) -> bool:
        """Whether it is known what it divides by."""
        name = self._function.__name__
        return name in _BY_TARGET or (name in _BY_ELEMENT and self.reduction != "batchmean")

    def summed(self) -> Tensor:
        """The loss with ``reduction="sum"``."""
        given = {**self._given, "reduction": "sum", **dict.fromkeys({"size_average", "reduce"} & self._given.keys())}
        loss: Tensor = self._function(**given)
        return loss

    def denominator(self) -> Tensor | float | None:
        """What the mean divides by; None where that depends on weights or is not known."""
        name, given = self._function.__name__, self._given
        if name in _BY_TARGET:
            return self._count_of_targets()
        if name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss") and given.get("weight") is not None:
            return None
        values, target = [value for value in given.values() if isinstance(value, Tensor)][:2]
        return float(math.prod(torch.broadcast_shapes(values.shape, target.shape)))  # type: ignore[no-untyped-call]

    def _target(self) -> Tensor:
        target: Tensor = self._given["target"]
        return target

    def _count_of_targets(self) -> Tensor | float | None:
        values, target, weight = self._given["input"], self._target(), self._given.get("weight")
        if target.is_floating_point():  # probabilities of classes
            return float(target.numel() / (values.shape[1] if values.dim() > 1 else values.shape[0]))
        if not has_data(target) or (weight is not None and not has_data(weight)):
            return None
        return count_of_targets(target, self._given["ignore_index"], weight)

    def counted_targets(self) -> tuple[Any, ...] | None:
        """What :func:`count_of_targets` is given; None where the mean divides by something else."""
        if not (self.is_mean and self.is_counted_by_target):
            return None
        return self._target(), self._given["ignore_index"], self._given.get("weight")


def count_of_targets(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """What a mean over ``target`` (int64, any shape) divides by: a number of targets, or the sum of their weights."""
    kept: Tensor = target != ignore_index
    if weight is None:
        return kept.sum()
    counted: Tensor = (weight[torch.where(kept, target, 0)] * kept).sum()
    return counted
