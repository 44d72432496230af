"""The private names of torch that the runtime uses; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_pp._private_names import private, reader_of, uses
from lightning_pp.split._torch_private import COMPILED_CALL

# whether the backward that runs wants this node; torch.autograd.graph.register_multi_grad_hook stands on it
will_execute: Callable[[Node], bool] = private("torch._C._will_engine_execute_node")
are_functorch_transforms_active: Callable[[], bool] = private("torch._C._are_functorch_transforms_active")
# a product of rows with one matrix for each group of them, whatever stands in its place while steps run
grouped_product: Callable[[Tensor, Tensor, Tensor], Tensor] = private("torch._grouped_mm")
# the tensor that a tensor is a view of; None if it is none
view_base: Callable[[Tensor], Tensor | None] = reader_of("torch.Tensor._base")
_delayed_error: Any = private("torch._C._functions.DelayedError")
_record_functions: Callable[[bool], None] = private("torch._C._autograd._enable_record_function")
_run_engine: Callable[..., Any] = private("torch.autograd.graph._engine_run_backward")


def run_backward(roots: Sequence[Any], gradients: Sequence[Tensor]) -> None:
    """``torch.autograd.backward(roots, gradients)`` without its first checks of them in Python.

    It is a sixth of the Python of an action of a pipeline (``benchmarks/steps/emulated.py``).

    Args:
        roots: Tensors or gradient edges.
        gradients: That of each, of its shape and dtype.

    Raises:
        RuntimeError: A gradient has another shape, or a root requires none.
    """
    _run_engine(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def unrecorded(call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)``, of which torch's profilers see nothing.

    They write to memory that is freed by then when a work of gloo ends after the profile that it began in. Messages do.
    """
    _record_functions(False)
    try:
        return call(*args)
    finally:
        _record_functions(True)


def edge_to(tensor: Tensor) -> GradientEdge:
    """Where the gradient of ``tensor``, which requires one, enters the graph; keeps the graph, and not the tensor."""
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr, None)


@uses("torch.Tensor._backward_hooks", "torch.Tensor._post_accumulate_grad_hooks")
def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks see the gradient of ``tensor``, or what is accumulated in it."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


@uses("torch.autograd.forward_ad._current_level")
def is_forward_mode_active() -> bool:
    """Whether derivatives are being taken in forward mode."""
    return forward_ad._current_level >= 0


def refusing_derivatives(tensor: Tensor, message: str) -> Tensor:
    """``tensor``, whose own derivative raises an error with ``message``."""
    refused: Tensor = _delayed_error(message, 1)(tensor)
    return refused


def is_compiled(module: nn.Module) -> bool:
    """Whether anything in ``module`` was compiled by ``torch.compile`` or ``Module.compile``."""
    kind = torch._dynamo.OptimizedModule  # looked up here, since importing torch._dynamo takes seconds
    return any(isinstance(each, kind) or vars(each).get(COMPILED_CALL) is not None for each in module.modules())
