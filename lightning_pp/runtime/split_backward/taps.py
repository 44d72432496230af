"""Gets the factors of weight gradients out of compiled code: as gradients of inputs that no operation reads.

A compiled function has no place where a queue could be filled, but it has inputs, and its backward returns their
gradients. So it gets two more inputs for each product with a weight, *dummies* shaped like the product's input and
output. :class:`TapInput` hands the input out as the gradient of the one, :class:`TapOutput` the output's gradient as
that of the other, and the weight goes in detached. The compiled backward then computes no weight gradient. What W needs
is what the backward returns, so its memory is not used again.

:class:`Dummies` makes these inputs in front of the compiled function, and gets their gradients behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_pp.runtime.split_backward.functions import (
    ConvolutionOptions,
    convolution_weight_gradient,
    weight_gradient_destination,
)
from lightning_pp.split._torch_private import version_of


class TapInput(Function):
    """``input``, which backward returns as the gradient of ``dummy`` (both of any shape ``[...]``)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dummy: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return input.detach()  # a view that a custom function returns could not be edited in place

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        (input,) = ctx.saved_tensors
        return grad_output, input


class TapOutput(Function):
    """``output``, whose gradient backward also returns as that of ``dummy`` (both of any shape ``[...]``)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, dummy: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output, grad_output


_tap_input: Callable[[Tensor, Tensor], Tensor] = TapInput.apply
_tap_output: Callable[[Tensor, Tensor], Tensor] = TapOutput.apply


def tap_input(input: Tensor, dummy: Tensor) -> Tensor:
    """``input``, in the dtype of ``dummy``: what autocast would make of it inside the product."""
    return _tap_input(input.to(dummy.dtype), dummy)


def tap_output(output: Tensor, dummy: Tensor) -> Tensor:
    """``output``, whose gradient comes out as that of ``dummy``."""
    return _tap_output(output, dummy)


class ProductShapes(NamedTuple):
    """The shapes of a product with a weight that its gradient needs.

    Attributes:
        input: Shape of its input.
        output: Shape of its output.
        dtype: Of its output, in which it is computed.
        rows_are_outputs: Whether the rows of the weight are output features, as those of ``F.linear``: the gradient is
            ``grad_outputᵀ @ input`` then, and ``inputᵀ @ grad_output`` otherwise.
        convolution: The options of a convolution; None for matrix products.
    """

    input: torch.Size
    output: torch.Size
    dtype: torch.dtype
    rows_are_outputs: bool
    convolution: ConvolutionOptions | None


class Dummies(Function):
    """Makes the dummies of one call of a compiled function, and computes the weights' gradients from theirs.

    ``Dummies.apply(zero_of, products, *weights)`` returns two tensors for each product, shaped like its input and its
    output. They have no memory of their own: ``zero_of(dtype)`` is one number, expanded.
    """

    @staticmethod
    def forward(ctx: Any, zero_of: Any, products: Sequence[ProductShapes], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.products = products
        ctx.weights = weights
        ctx.versions = [version_of(weight) for weight in weights]
        dummies = []
        for product in products:
            zero = zero_of(product.dtype)
            dummies += [zero.expand(product.input), zero.expand(product.output)]
        return tuple(dummies)

    @staticmethod
    def backward(ctx: Any, *handed_out: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for index, (product, weight, version) in enumerate(zip(ctx.products, ctx.weights, ctx.versions, strict=True)):
            input, grad_output = handed_out[2 * index : 2 * index + 2]
            if input is None or grad_output is None:  # nothing depends on this product's output
                gradients.append(None)
            else:
                node = ctx.next_functions[index][0]
                gradients.append(_deliver(product, weight, version, node, input, grad_output))
        return (None, None, *gradients)


def _deliver(
    product: ProductShapes, weight: Tensor, version: int, node: Any, input: Tensor, grad_output: Tensor
) -> Tensor | None:
    """Queues the weight gradient, or returns it where it may not wait."""
    queue = weight_gradient_destination(weight, version, node)
    if queue is False:
        return None
    if product.convolution is not None:
        if queue is True:
            return convolution_weight_gradient(weight, grad_output, input, product.convolution)
        queue.append(weight, grad_output, input.detach(), convolution_weight_gradient, product.convolution)
        return None
    left, right = (grad_output, input) if product.rows_are_outputs else (input, grad_output)
    if queue is not True:
        queue.append(weight, left.detach(), right.detach())
        return None
    if weight.dim() == 3:
        return torch.bmm(left.mT, right)
    return torch.mm(left.flatten(0, -2).t(), right.flatten(0, -2))


make_dummies: Callable[..., tuple[Tensor, ...]] = Dummies.apply
