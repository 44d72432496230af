"""The product of torchao's float8 linears as an autograd function that can defer its weight gradient.

Imported only where torchao's float8 linears are. Forward is torchao's own; backward computes what torchao's does, bit
for bit, and casts the factors of the weight gradient in W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torchao.float8.float8_linear import (
    GemmInputRole,
    ScalingType,
    get_maybe_axiswise_dim,
    hp_tensor_to_float8_dynamic,
    matmul_with_hp_or_float8_args,
    tensor_already_casted_to_fp8,
)

from lightning_pp.runtime._torch_private import view_base
from lightning_pp.runtime.split_backward.functions import Grads, weight_gradient_destination
from lightning_pp.split._torch_private import version_of

PRODUCT = matmul_with_hp_or_float8_args
_mm = torch.mm


class DeferredFloat8(Function):
    """``F.linear(input, weight)`` in float8: ``[..., N]``, a Parameter ``[M, N]`` to ``[..., M]``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Parameter, mm_config: Any, config: Any) -> Tensor:
        output: Tensor = PRODUCT.forward(ctx, input, weight.t(), mm_config, config)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input)  # in the place of what torchao saves, which has the weight among it
        ctx.weight, ctx.weight_version = weight, version_of(weight)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Grads:
        if grad_output is None:
            return None, None, None, None
        (input,) = ctx.saved_tensors
        weight, config, options = ctx.weight, ctx.config, (ctx.linear_mm_config, ctx.config)
        rows = grad_output.reshape(-1, grad_output.size(-1))
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            left = _cast(rows, config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1, *options)
            right = _cast(weight.t(), config.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT, -1, *options)
            grad_input = _mm(left, right.t()).reshape(input.shape)
        queue = weight_gradient_destination(weight, ctx.weight_version, ctx.next_functions[1][0])
        if queue is True or (queue is not False and type(rows) is not Tensor):
            grad_weight = _weight_gradient(weight, rows, input, options)
        elif queue is not False:
            queue.append(weight, rows, input.detach(), _weight_gradient, options)
        return grad_input, grad_weight, None, None


def replace_float8(
    original: Callable[..., Any], is_deferrable: Callable[[Tensor, Any], bool]
) -> Callable[[Tensor, Tensor, Any, Any], Any]:
    """Replaces ``matmul_with_hp_or_float8_args.apply``, which gets ``weight.t()``."""
    apply: Callable[..., Any] = super(Function, DeferredFloat8).apply

    def float8_product(input: Tensor, weight: Tensor, mm_config: Any, config: Any) -> Any:
        if type(weight) is Tensor and not torch.compiler.is_compiling():
            parameter = view_base(weight)
            if (
                type(parameter) is Parameter
                and weight.shape == parameter.shape[::-1]
                and is_deferrable(input, parameter)
            ):
                return apply(input, parameter, mm_config, config)
        return original(input, weight, mm_config, config)

    return float8_product


def _weight_gradient(weight: Tensor, rows: Tensor, input: Tensor, options: tuple[Any, Any]) -> Tensor:
    config = options[1]
    input = input.reshape(-1, input.size(-1))
    left = _cast(rows, config.cast_config_grad_output_for_grad_weight, GemmInputRole.GRAD_OUTPUT, 0, *options)
    right = _cast(input, config.cast_config_input_for_grad_weight, GemmInputRole.INPUT, 0, *options)
    return _mm(left.t(), right)


def _cast(factor: Tensor, cast: Any, role: Any, dim: int, mm_config: Any, config: Any) -> Tensor:
    """A factor in float8, with a scale for the tensor or for each row along ``dim``, as ``cast`` says."""
    if tensor_already_casted_to_fp8(factor) or cast.scaling_type is ScalingType.DISABLED:
        return factor
    in_float8: Tensor = hp_tensor_to_float8_dynamic(
        factor,
        cast.target_dtype,
        mm_config,
        gemm_input_role=role,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    return in_float8
