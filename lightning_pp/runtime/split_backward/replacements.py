"""The table of torch functions that are replaced while steps with a split backward run.

Why the functions themselves, and no ``TorchFunctionMode``: a mode is off for the whole of ``backward``, so the blocks
that activation checkpointing re-runs there would not meet it, and torch stops with a CheckpointError. It is off as
well in ``F.multi_head_attention_forward``, so a third of the weights of ``nn.TransformerEncoderLayer`` would get their
gradients in I. ``benchmarks/costs/split_backward.py`` shows both.

A name that other code has already replaced is left alone, and names bound earlier (``from torch.nn.functional import
linear``) still mean torch's function; what goes past the table gets its whole gradient in I.

Code that compares a function it was handed with ``F.linear`` while a scope is active compares with the replacement; a
tensor subclass should look its functions up when it is imported, as they commonly do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from lightning_pp.runtime._torch_private import are_functorch_transforms_active, is_forward_mode_active, view_base
from lightning_pp.runtime.split_backward.functions import (
    DeferredConvolution,
    DeferredLinear,
    DeferredMatmul,
    convolution_options,
)
from lightning_pp.split.record.products import PRODUCTS, Family, Product
from lightning_pp.tensor.region import OPEN

TensorFunction = Callable[..., Any]

_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_strided = torch.strided

# Function.apply without its look at functorch, which _is_deferrable has already had: a sixth of the cost of a small
# linear.
_apply_linear: TensorFunction = super(Function, DeferredLinear).apply
_apply_matmul: TensorFunction = super(Function, DeferredMatmul).apply
_apply_convolution: TensorFunction = super(Function, DeferredConvolution).apply


def _is_deferrable(input: Any, weight: Any, bias: Any = None) -> bool:
    """Whether the gradient of ``weight`` can be deferred in a product of ``input`` with it.

    Ordered so that what is not deferred mostly leaves at the first line: this runs on every call of every replaced
    function.
    """
    if OPEN.count:  # a tensor-parallel region has to see it first, and calls it again
        return False
    if (type(weight) is not Parameter and not _is_view_of_parameter(weight)) or INSTALLATION.num_pauses:
        return False
    return (
        weight.requires_grad
        and (type(input) is Tensor or type(input) is Parameter)
        and (bias is None or type(bias) is Parameter or type(bias) is Tensor)
        and _is_grad_enabled()
        and not are_functorch_transforms_active()
        and not is_forward_mode_active()
        and weight.is_floating_point()
        and weight.layout is _strided
        and input.layout is _strided
        and not input.is_nested
    )


def _is_view_of_parameter(weight: Any) -> bool:
    """Whether ``weight`` is a view of a Parameter, such as ``.t()`` or one of ``.chunk(3)``, without overlaps."""
    if type(weight) is not Tensor or not weight.requires_grad:
        return False
    parameter = view_base(weight)
    if type(parameter) is not Parameter or weight.dtype is not parameter.dtype or weight.layout is not _strided:
        return False
    span = 1
    for stride, size in sorted(zip(weight.stride(), weight.shape, strict=True)):
        if size != 1:
            if stride < span:
                return False
            span = stride * size
    return True


def _autocast_dtype(input: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype that autocast would have the product computed in; None if it leaves it alone, as it does float64."""
    device_type = "cuda" if weight.is_cuda else "cpu" if weight.is_cpu else weight.device.type
    if device_type not in ("cuda", "cpu") and not torch.amp.is_autocast_available(device_type):
        return None
    if not _is_autocast_enabled(device_type) or weight.dtype is torch.float64 or input.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(device_type)


def _replace_linear(original: TensorFunction, product: Product) -> TensorFunction:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if (
            not _is_compiling()
            and _is_deferrable(input, weight, bias)
            and weight.dim() == 2
            and input.dim() > 1  # a lone vector is not worth it
        ):
            return _apply_linear(input, weight, bias, _autocast_dtype(input, weight))
        return original(input, weight, bias)

    return linear


def _replace_matmul(original: TensorFunction, product: Product) -> TensorFunction:
    """For ``matmul``, ``mm`` and ``bmm``, with the weight on the right."""
    num_dims = product.num_dims

    def matmul(*args: Any, **options: Any) -> Any:
        if len(args) == 2 and not options and not _is_compiling() and _is_deferrable(*args):
            input, weight = args
            input_dims, weight_dims = input.dim(), weight.dim()
            if num_dims is None or input_dims == weight_dims == num_dims:
                is_batch = weight_dims == input_dims == 3 and input.size(0) == weight.size(0)
                if is_batch or (weight_dims == 2 and input_dims > 1):
                    return _apply_matmul(input, weight, None, _autocast_dtype(input, weight), None)
        return original(*args, **options)

    return matmul


def _replace_grouped_matmul(original: TensorFunction, product: Product) -> TensorFunction:
    def grouped_matmul(input: Tensor, weight: Tensor, offs: Tensor | None = None, *args: Any, **options: Any) -> Any:
        is_plain = offs is not None and not args and all(option is None for option in options.values())
        if is_plain and not _is_compiling() and _is_deferrable(input, weight) and (input.dim(), weight.dim()) == (2, 3):
            return _apply_matmul(input, weight, None, None, offs)  # autocast leaves it alone
        return original(input, weight, offs, *args, **options)

    return grouped_matmul


def _replace_addmm(original: TensorFunction, product: Product) -> TensorFunction:
    def addmm(*args: Any, **options: Any) -> Any:  # options: beta and alpha
        if len(args) == 3 and not options and not _is_compiling():
            bias, input, weight = args
            if _is_deferrable(input, weight, bias) and input.dim() == weight.dim() == 2:
                return _apply_matmul(input, weight, bias, _autocast_dtype(input, weight), None)
        return original(*args, **options)

    return addmm


def _replace_convolution(original: TensorFunction, product: Product) -> TensorFunction:
    num_dims = product.num_dims

    def convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        is_deferrable = not _is_compiling() and _is_deferrable(input, weight, bias) and weight.dim() == num_dims
        is_deferrable = is_deferrable and 0 <= weight.dim() - input.dim() <= 1
        found = convolution_options(product, weight, args, kwargs) if is_deferrable else None
        if found is None:
            return original(input, weight, bias, *args, **kwargs)
        options, extra = found
        dtype = _autocast_dtype(input, weight)
        if extra:
            input = F.pad(input, extra)
        if input.dim() == num_dims:
            return _apply_convolution(input, weight, bias, dtype, options)
        return _apply_convolution(input.unsqueeze(0), weight, bias, dtype, options).squeeze(0)

    return convolution


class Replacement(NamedTuple):
    """One entry of the table."""

    owner: Any
    name: str
    original: TensorFunction
    function: TensorFunction


_REPLACE: Mapping[Family, Callable[[TensorFunction, Product], TensorFunction]] = {
    Family.LINEAR: _replace_linear,
    Family.MATMUL: _replace_matmul,
    Family.GROUPED: _replace_grouped_matmul,
    Family.ADDMM: _replace_addmm,
    Family.CONVOLUTION: _replace_convolution,
    Family.TRANSPOSED_CONVOLUTION: _replace_convolution,
}


def _build_table() -> list[Replacement]:
    table = []
    for product in PRODUCTS:
        for owner in product.owners:
            original = getattr(owner, product.name)
            function = _REPLACE[product.family](original, product)
            function.__name__ = product.name
            function.__doc__ = original.__doc__
            table.append(Replacement(owner, product.name, original, function))
    return table


TABLE = _build_table()


@cache
def _import_float8() -> Replacement:
    from lightning_pp.runtime.split_backward import float8

    original = float8.PRODUCT.apply
    return Replacement(float8.PRODUCT, "apply", original, float8.replace_float8(original, _is_deferrable))


class _Installation:
    """Counts the scopes that turn replacements on and those that turn them off, and keeps the installed ones."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_scopes = 0
        self.num_pauses = 0
        self.in_place: list[Replacement] = []

    def enter(self) -> None:
        with self.lock:
            self.num_scopes += 1
            if self.num_scopes > 1:
                return
            if "torchao.float8.float8_linear" in sys.modules and (float8 := _import_float8()) not in TABLE:
                TABLE.append(float8)
            for entry in TABLE:
                if getattr(entry.owner, entry.name) == entry.original:  # each look at a class method makes another
                    setattr(entry.owner, entry.name, entry.function)
                    self.in_place.append(entry)

    def leave(self) -> None:
        with self.lock:
            self.num_scopes -= 1
            if self.num_scopes:
                return
            while self.in_place:
                entry = self.in_place.pop()
                if getattr(entry.owner, entry.name) is not entry.function:
                    continue  # replaced again by somebody inside the scope, who may restore it to ours: theirs to tidy
                if isinstance(entry.owner, type):
                    delattr(entry.owner, entry.name)  # inherited, and setting it would leave it in the class's own dict
                else:
                    setattr(entry.owner, entry.name, entry.original)

    def pause(self) -> None:
        with self.lock:
            self.num_pauses += 1

    def resume(self) -> None:
        with self.lock:
            self.num_pauses -= 1


INSTALLATION = _Installation()
