"""Compiled code with deferred weight gradients: a backend of ``torch.compile`` that wraps the real one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from lightning_pp.runtime.split_backward.graph_products import (
    ProductCall,
    find_products,
    values_of,
    weights_in_use,
    with_taps,
)
from lightning_pp.runtime.split_backward.taps import ProductShapes, make_dummies

CAPTURE_OPTIONS = ("fullgraph", "dynamic", "disable")
"""Options of ``torch.compile`` that say how code is captured; the others say what is made of it."""

_MOST_SHAPES = 256
_log = logging.getLogger(__name__)


class DeferringBackend:
    """Compiles every captured graph with taps around its products with weights.

    What is compiled computes no gradient of these weights in its backward; it hands out what they are made of
    (:mod:`~lightning_pp.runtime.split_backward.taps`). Code between two graph breaks is a graph by itself. A product
    whose weight is neither a Parameter nor a view of one, or that stands in a checkpointed or otherwise nested part of
    the graph, keeps its weight gradient in the backward.

    Args:
        options: Of ``torch.compile``, for the graphs; those of :data:`CAPTURE_OPTIONS` are not used.
        defers: Whether weight gradients wait; otherwise graphs are compiled as they are.

    Attributes:
        kept: Weights of graphs compiled so far whose gradients stay in the backward; for the caller to empty.
    """

    def __init__(self, options: Mapping[str, Any], defers: bool = True) -> None:
        self._options = {name: value for name, value in options.items() if name not in CAPTURE_OPTIONS}
        self._defers, self.kept = defers, list[Tensor]()

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return _TappedGraph(module, self._options, self.kept if self._defers else None)


class _TappedGraph:
    """A graph that is compiled at its first call, when its parameters are gathered."""

    def __init__(self, module: fx.GraphModule, options: Mapping[str, Any], kept: list[Tensor] | None) -> None:
        self._module = module
        self._options = options
        self._kept = kept
        self._compiled: Callable[..., Any] | None = None
        self._products: list[ProductCall] = []
        self._known: dict[tuple[Any, ...], list[ProductShapes]] = {}
        self._zeros: dict[torch.dtype, Tensor] = {}

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            self._compiled = self._compile(args)
        products = self._products
        if not products:
            return self._compiled(*args)
        weights = [product.weight_of(args) for product in products]
        device = weights[0].device

        def zero_of(dtype: torch.dtype) -> Tensor:
            if dtype not in self._zeros:
                self._zeros[dtype] = torch.zeros((), dtype=dtype, device=device)
            return self._zeros[dtype]

        dummies = make_dummies(zero_of, self._shapes(args), *weights)
        return self._compiled(*args, *dummies)

    def _find_products(self, args: Sequence[Any], kept: list[Tensor]) -> None:
        try:
            self._products = find_products(self._module, args, values_of(self._module, args))
        except Exception as error:  # an operation that fakes do not know: the graph is compiled as it is
            _log.debug("weight gradients stay in a compiled backward: %s", error)
        deferred = {product.parameter for product in self._products}
        kept += [args[index] for index in weights_in_use(self._module, args) if index not in deferred]

    def _compile(self, args: Sequence[Any]) -> Callable[..., Any]:
        if self._kept is not None:
            self._find_products(args, self._kept)
        module = with_taps(self._module, self._products)

        def call(*given: Any) -> Any:
            return module(*given)

        # torch.compile keeps what it has compiled with the code of a function, and counts it there
        own = FunctionType(call.__code__.replace(), call.__globals__, "compiled_graph", None, call.__closure__)
        return torch.compile(own, **self._options, fullgraph=True, dynamic=any(isinstance(arg, int) for arg in args))

    def _shapes(self, args: Sequence[Any]) -> list[ProductShapes]:
        """The shapes of the products; with sizes among the inputs they depend on them."""
        key: tuple[Any, ...] = ()
        if any(isinstance(arg, int) for arg in args):
            key = tuple(arg.shape if isinstance(arg, Tensor) else arg for arg in args)
        if key not in self._known:
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            values = values_of(self._module, args)
            self._known[key] = [product.shapes(values) for product in self._products]
        return self._known[key]
