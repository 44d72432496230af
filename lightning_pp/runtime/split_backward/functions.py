"""Linear operations as autograd functions that can defer their weight gradients.

Each computes what the torch function of its name computes. Its backward returns the gradients of the input and of the
bias, and either queues the weight's (inside
:func:`~lightning_pp.runtime.split_backward.queue.collect_weight_gradients`) or returns it too.

The weight stays on ``ctx`` as the object it is, a Parameter or a view of one, and is not saved for backward: FSDP2
frees and gathers its storage in between, and W must find the very Parameter whose ``.grad`` is reduced. The input is
saved, so that activation checkpointing and other saved-tensor hooks see it.

Under autocast (``dtype`` given) the functions cast for themselves, with autocast's results but without keeping a copy
of each weight for every microbatch under way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from lightning_pp.runtime._torch_private import (
    grouped_product,
    has_gradient_hooks,
    refusing_derivatives,
    view_base,
    will_execute,
)
from lightning_pp.runtime.split_backward.queue import COLLECTOR, WeightGradientQueue
from lightning_pp.split._torch_private import version_of
from lightning_pp.split.record.products import Family, Product

# torch's own functions, whatever stands in their place while steps run.
_linear = F.linear
_matmul = torch.matmul
_addmm = torch.addmm
_mm = torch.mm
_bmm = torch.bmm
_convolution = torch.convolution
_convolution_backward = torch.ops.aten.convolution_backward.default
_is_grad_enabled = torch.is_grad_enabled

Grads = tuple[Tensor | None, ...]


class ConvolutionOptions(NamedTuple):
    """The arguments of a convolution besides its tensors, each a list with one number per spatial dimension."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    is_transposed: bool
    output_padding: list[int]
    num_groups: int


def per_dimension(value: int | Sequence[int], num_spatial: int) -> list[int]:
    """An option of a convolution, written as a number for each of ``num_spatial`` dimensions."""
    return [value] * num_spatial if isinstance(value, int) else list(value) * (num_spatial if len(value) == 1 else 1)


def convolution_options(
    product: Product, weight: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[ConvolutionOptions, list[int]] | None:
    """The arguments of a convolution after its bias, and the padding of its input; None if torch refuses them."""
    num_spatial, is_transposed = product.num_spatial, product.family is Family.TRANSPOSED_CONVOLUTION
    names: tuple[str, ...] = ("stride", "padding", "dilation", "groups")
    if is_transposed:
        names = ("stride", "padding", "output_padding", "groups", "dilation")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    padding = given.get("padding", 0)
    is_unknown = isinstance(padding, str) and (is_transposed or padding not in ("same", "valid"))
    if is_unknown or len(given) < len(args) + len(kwargs) or not given.keys() <= set(names):
        return None
    dilation = per_dimension(given.get("dilation", 1), num_spatial)
    extra: list[int] = []
    if padding == "same":  # an odd total goes to the end, as in torch
        totals = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
        padding = [total // 2 for total in totals]
        if any(total % 2 for total in totals):
            extra = [end for total in reversed(totals) for end in (0, total % 2)]
    options = ConvolutionOptions(
        stride=per_dimension(given.get("stride", 1), num_spatial),
        padding=per_dimension(0 if padding == "valid" else padding, num_spatial),
        dilation=dilation,
        is_transposed=is_transposed,
        output_padding=per_dimension(given.get("output_padding", 0), num_spatial),
        num_groups=given.get("groups", 1),
    )
    return options, extra


class DeferredLinear(Function):
    """``F.linear(input, weight, bias)``: ``[..., N]``, ``[M, N]``, ``[M]`` to ``[..., M]``; input at least 2D."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        input, factor, bias = _prepare(ctx, input, weight, bias, dtype)
        if input.dim() == 2:
            return _linear(input, factor, bias)
        # Detached, because these are views, and a view that a custom function returns may not be edited in place.
        if input.is_contiguous():
            return _linear(input, factor, bias).detach()
        # While gradients are not recorded, torch would multiply by an expanded weight instead of folding rows together.
        output = _mm(input.reshape(-1, input.size(-1)), factor.t())
        if bias is not None:
            output = output + bias  # not in place: selective checkpointing may have kept the product
        return output.view(*input.shape[:-1], factor.size(0)).detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Grads:
        if grad_output is None:
            return None, None, None, None
        (input,) = ctx.saved_tensors
        needs_input, _, needs_bias, _ = ctx.needs_input_grad
        weight = ctx.weight
        rows = grad_output if grad_output.dim() == 2 else grad_output.flatten(0, -2)
        grad_input = grad_weight = grad_bias = None
        if needs_input:
            grad_input = _mm(rows, weight if ctx.dtype is None else weight.to(ctx.dtype))
            if input.dim() != 2:
                grad_input = grad_input.view(input.shape)
        queue = weight_gradient_destination(ctx.weight, ctx.weight_version, ctx.next_functions[1][0])
        if queue is True:
            grad_weight = _mm(rows.t(), input.flatten(0, -2))
        elif queue is not False:
            queue.append(weight, rows, input.detach())
        if needs_bias:
            grad_bias = _grad_bias(ctx, grad_output, rows)
        return grad_input, _finish(ctx, grad_weight), grad_bias, None


class DeferredMatmul(Function):
    """``bias + input @ weight``: ``[..., M]``, ``[M, N]`` to ``[..., N]``; with a bias (addmm), input 2D.

    Without a bias also ``[B, K, M]``, ``[B, M, N]`` to ``[B, K, N]`` (bmm), and with ``ends`` (int32 ``[G]``) a grouped
    product, ``[K, M]``, ``[G, M, N]`` to ``[K, N]``: matrix i multiplies the rows before ``ends[i]``.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, ends: Tensor | None
    ) -> Tensor:
        input, factor, bias = _prepare(ctx, input, weight, bias, dtype)
        if ends is not None:
            ctx.save_for_backward(input, ends)
            return grouped_product(input, factor, ends)
        return _matmul(input, factor) if bias is None else _addmm(bias, input, factor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Grads:
        if grad_output is None:
            return None, None, None, None, None
        input, *ends = ctx.saved_tensors
        needs_input, _, needs_bias, _, _ = ctx.needs_input_grad
        weight = ctx.weight
        multiply: Callable[..., Tensor] = _mm if weight.dim() == 2 else grouped_product if ends else _bmm
        is_flat = weight.dim() == 3 or grad_output.dim() == 2
        left, rows = (input, grad_output) if is_flat else (input.flatten(0, -2), grad_output.flatten(0, -2))
        grad_input = grad_weight = grad_bias = None
        if needs_input:
            grad_input = multiply(rows, (weight if ctx.dtype is None else weight.to(ctx.dtype)).mT, *ends)
            if not is_flat:
                grad_input = grad_input.view(input.shape)
        queue = weight_gradient_destination(ctx.weight, ctx.weight_version, ctx.next_functions[1][0])
        if queue is True:
            grad_weight = _grouped_gradient(weight, left, rows, *ends) if ends else multiply(left.mT, rows)
        elif queue is not False:
            queue.append(weight, input.detach(), rows, _grouped_gradient if ends else None, *ends)
        if needs_bias:
            grad_bias = _grad_bias(ctx, grad_output, rows)
        return grad_input, _finish(ctx, grad_weight), grad_bias, None, None


def _grouped_gradient(weight: Tensor, input: Tensor, grad_output: Tensor, ends: Tensor) -> Tensor:
    """The weight gradient of a grouped product; in memory it lies as the weight does, as autograd's."""
    if weight.stride(-2) == 1:
        return grouped_product(grad_output.t(), input, ends).mT
    return grouped_product(input.t(), grad_output, ends)


class DeferredConvolution(Function):
    """``torch.convolution(input, weight, bias, *options)``, of one to three spatial dimensions, transposed or not."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None,
        options: ConvolutionOptions,
    ) -> Tensor:
        input, factor, bias = _prepare(ctx, input, weight, bias, dtype)
        ctx.options = options
        return _convolution(input, factor, bias, *options)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Grads:
        if grad_output is None:
            return None, None, None, None, None
        (input,) = ctx.saved_tensors
        needs_input, _, needs_bias, _, _ = ctx.needs_input_grad
        weight, options = ctx.weight, ctx.options
        grad_input = grad_weight = grad_bias = None
        queue = weight_gradient_destination(ctx.weight, ctx.weight_version, ctx.next_functions[1][0])
        factor = weight if ctx.dtype is None else weight.to(ctx.dtype)
        if queue is True:
            grad_input, grad_weight, grad_bias = _convolution_backward(
                grad_output,
                input,
                factor,
                [grad_output.size(1)] if needs_bias else None,
                *options,
                [needs_input, True, needs_bias],
            )
        else:
            if needs_input:
                grad_input = _convolution_backward(grad_output, input, factor, None, *options, [True, False, False])[0]
            if needs_bias:  # not by the kernel, for oneDNN's would compute the weight's gradient with it
                grad_bias = grad_output.sum([0, *range(2, grad_output.dim())])
            if queue is not False:
                queue.append(weight, grad_output, input.detach(), convolution_weight_gradient, options)
        return grad_input, _finish(ctx, grad_weight), grad_bias, None, None


def convolution_weight_gradient(
    weight: Tensor, grad_output: Tensor, input: Tensor, options: ConvolutionOptions
) -> Tensor:
    """The weight gradient of a convolution, in the dtype of ``grad_output`` and ``input``."""
    # Only the shape is read, and the weight's own storage may be freed by now.
    shape_of_weight = grad_output.new_empty(1).expand(weight.shape)
    grad_weight: Tensor = _convolution_backward(
        grad_output, input, shape_of_weight, None, *options, [False, True, False]
    )[1]
    return grad_weight


def _prepare(
    ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keeps on ``ctx`` what backward needs; returns the arguments in the dtype to compute in."""
    ctx.set_materialize_grads(False)
    ctx.weight = weight
    ctx.weight_version = version_of(weight)
    ctx.dtype = dtype
    ctx.bias_shape = None if bias is None or bias.dim() == 1 else bias.shape
    if dtype is not None:
        input, weight = _cast_input(input, dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    ctx.save_for_backward(input)
    return input, weight, bias


def weight_gradient_destination(weight: Tensor, version: int, node: Any) -> WeightGradientQueue | bool:
    """Where a weight gradient of the node that runs goes: to a queue, back to autograd (True), or nowhere (False).

    Args:
        weight: A Parameter or a view of one.
        version: The weight's when the forward ran.
        node: What autograd would run for the weight's gradient.

    Raises:
        RuntimeError: The weight was modified in place since.
    """
    if version_of(weight) != version:
        raise RuntimeError(
            f"a weight of shape {list(weight.shape)} was modified in place between its forward and its backward "
            f"(version {version} became {version_of(weight)}). Update weights only between steps"
        )
    parameter = weight
    is_view_wanted = False
    if type(weight) is not Parameter:
        base = view_base(weight)
        assert base is not None
        parameter = base
        is_view_wanted = will_execute(node)
        while node.next_functions:
            node = node.next_functions[0][0]
    try:
        if not will_execute(node):  # the parameter is not among the inputs of this backward
            return is_view_wanted
    except RuntimeError:  # torch.autograd.grad asks for this very parameter
        return True
    queue = COLLECTOR.queue
    if (
        queue is None
        or _is_grad_enabled()  # create_graph: the gradient has to be differentiable
        or has_gradient_hooks(parameter)  # they see what autograd accumulates
        or (weight is not parameter and has_gradient_hooks(weight))
        or torch.compiler.is_compiling()
    ):
        return True
    return queue


def _grad_bias(ctx: Any, grad_output: Tensor, rows: Tensor) -> Tensor:
    return rows.sum(0) if ctx.bias_shape is None else grad_output.sum_to_size(ctx.bias_shape)


def _finish(ctx: Any, grad_weight: Tensor | None) -> Tensor | None:
    """Refuses the one thing that saving a cast input loses: a second derivative through the weight gradient."""
    if grad_weight is None or ctx.dtype is None or not _is_grad_enabled():
        return grad_weight
    return refusing_derivatives(
        grad_weight,
        "a weight gradient made under autocast cannot be differentiated again inside weight_gradients_deferrable(). "
        "Take second derivatives outside autocast, or outside a step whose backward is split",
    )


class _LastCast(threading.local):
    """The last input that was cast in this thread: query, key and value projections then keep one copy, not three."""

    source: weakref.ref[Tensor] | None = None
    version = -1
    result: weakref.ref[Tensor] | None = None


_last_cast = _LastCast()


def _cast_input(input: Tensor, dtype: torch.dtype) -> Tensor:
    if input.dtype is dtype:
        return input
    last = _last_cast
    if last.source is not None and last.source() is input and last.version == version_of(input):
        result = last.result() if last.result is not None else None
        if result is not None and result.dtype is dtype:
            return result
    result = input.to(dtype)
    last.source, last.version, last.result = weakref.ref(input), version_of(input), weakref.ref(result)
    return result
