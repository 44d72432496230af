"""Products with a weight in a graph that ``torch.compile`` has captured, and the graph with taps around them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_pp.runtime.split_backward.functions import ConvolutionOptions, convolution_options
from lightning_pp.runtime.split_backward.taps import ProductShapes, tap_input, tap_output
from lightning_pp.split._torch_private import FakeTensorMode
from lightning_pp.split.record.products import TARGETS, Family, Product

_CONVOLUTIONS = (Family.CONVOLUTION, Family.TRANSPOSED_CONVOLUTION)
# calls that make views of their first argument
_VIEWS = frozenset({"t", "transpose", "chunk", "split", "narrow", "unbind", "permute", torch.t, torch.transpose})
_VIEWS |= {torch.chunk, torch.split, torch.narrow, torch.unbind, torch.permute, operator.getitem}
_VIEW_ATTRIBUTES = ("T", "mT")
# what torch 2.15 captures for these
_VIEWS |= {each for packet in (torch.ops.aten.numpy_T, torch.ops.aten.mT) for each in (packet, packet.default)}


class ProductCall(NamedTuple):
    """A call in a graph whose weight gradient can be computed outside of it.

    Attributes:
        node: The call.
        product: What it calls.
        parameter: Position of the Parameter among the graph's inputs.
        views: What makes the weight of the Parameter, first to last; empty if it is the Parameter.
    """

    node: fx.Node
    product: Product
    parameter: int
    views: tuple[fx.Node, ...]

    @property
    def input(self) -> fx.Node:
        """Its input."""
        return _argument(self.node, self.product.input)

    @property
    def weight(self) -> fx.Node:
        """Its weight."""
        return _argument(self.node, self.product.weight)

    def weight_of(self, args: Sequence[Any]) -> Tensor:
        """The weight, as the Parameter among the graph's inputs ``args`` that it is, or the view of it."""
        value = args[self.parameter]
        for view in self.views:
            rest = view.args[1:]
            target: Any = view.target
            if view.op == "call_method":
                target = getattr(Tensor, target)
            value = target(value, *rest, **view.kwargs)
        assert isinstance(value, Tensor)
        return value

    def shapes(self, values: dict[fx.Node, Any]) -> ProductShapes:
        """What its gradient needs to know, given fakes for the values of the graph."""
        input, output, product = values[self.input], values[self.node], self.product
        options = (
            _convolution_options(self.node, product, values[self.weight]) if product.family in _CONVOLUTIONS else None
        )
        return ProductShapes(input.shape, output.shape, output.dtype, product.family is Family.LINEAR, options)


class _Recording(fx.Interpreter):
    """Runs a graph and keeps its values."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = result = super().run_node(n)
        return result


def values_of(module: fx.GraphModule, args: Sequence[Any]) -> dict[fx.Node, Any]:
    """The values of a graph that is called with ``args``, as fakes: nothing is computed.

    Raises:
        Exception: An operation of the graph cannot run on fakes.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        recording = _Recording(module)
        recording.run(*(mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args))
    return recording.values


def find_products(module: fx.GraphModule, args: Sequence[Any], values: dict[fx.Node, Any]) -> list[ProductCall]:
    """The products whose weight gradients can be computed outside of the graph, in the order of their calls.

    Args:
        module: What ``torch.compile`` captured; parameters are among its inputs.
        args: What it is called with.
        values: Of its nodes, as fakes.
    """
    parameters = _trained_weights(module, args)
    products = []
    for node in module.graph.nodes:
        product = TARGETS.get(node.target) if node.op in ("call_function", "call_method") else None
        if product is None or (node.kwargs and product.family in (Family.MATMUL, Family.ADDMM)):
            continue
        call = _call(node, product, parameters)
        if call is not None and _has_known_gradient(call, values):
            products.append(call)
    return products


def weights_in_use(module: fx.GraphModule, args: Sequence[Any]) -> list[int]:
    """Positions of the trained weights that something else than a look-up of rows (an embedding) reads."""
    return [
        index
        for node, index in _trained_weights(module, args).items()
        if any(user.target not in (F.embedding, torch.embedding) for user in node.users)
    ]


def _trained_weights(module: fx.GraphModule, args: Sequence[Any]) -> dict[fx.Node, int]:
    inputs = module.graph.find_nodes(op="placeholder")
    return {node: index for index, node in enumerate(inputs) if _is_trained_weight(args[index])}


def with_taps(module: fx.GraphModule, products: Sequence[ProductCall]) -> fx.GraphModule:
    """A copy of the graph with two inputs more for each product, and the product between taps that use them."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node in graph.nodes:  # torch.compile captures such a call by a function of its own, which it does not capture
        if getattr(node.target, "__name__", None) == "trampoline_autograd_apply":
            node.target = _wrap_apply(inspect.getclosurevars(node.target).nonlocals["fn_cls"])
    last = graph.find_nodes(op="placeholder")[-1]
    for index, product in enumerate(products):
        dummies = []
        for name in (f"dummy_input_{index}", f"dummy_output_{index}"):
            with graph.inserting_after(last):
                last = graph.placeholder(name)
            dummies.append(last)
        node = copies[product.node]
        with graph.inserting_before(node):
            input = graph.call_function(tap_input, (_argument(node, product.product.input), dummies[0]))
            weight = graph.call_method("detach", (_argument(node, product.product.weight),))
        arguments = list(node.args)
        arguments[product.product.input], arguments[product.product.weight] = input, weight
        node.args = tuple(arguments)
        with graph.inserting_after(node):
            output = graph.call_function(tap_output, (node, dummies[1]))
        for user in list(node.users):
            if user is not output:
                user.replace_input_with(node, output)
    return fx.GraphModule(module, graph)


def _wrap_apply(function: Any) -> Callable[..., Any]:
    def apply(*args: Any) -> Any:
        return function.apply(*args)

    return apply


def _argument(node: fx.Node, position: int) -> fx.Node:
    argument = node.args[position]
    assert isinstance(argument, fx.Node)
    return argument


def _is_trained_weight(arg: Any) -> bool:
    return (
        type(arg) is torch.nn.Parameter
        and arg.requires_grad
        and arg.is_floating_point()
        and arg.layout is torch.strided
        and arg.dim() > 1
    )


def _call(node: fx.Node, product: Product, parameters: dict[fx.Node, int]) -> ProductCall | None:
    positions = product.input, product.weight
    if len(node.args) <= max(positions) or not all(isinstance(node.args[at], fx.Node) for at in positions):
        return None
    views: list[fx.Node] = []
    source = _argument(node, product.weight)
    while source not in parameters:
        if not _is_view(source):
            return None
        views.append(source)
        source = _argument(source, 0)
    return ProductCall(node, product, parameters[source], tuple(reversed(views)))


def _is_view(node: fx.Node) -> bool:
    """Whether a call makes a view, or several, of its first argument, which is the only tensor it is given."""
    is_known = node.target in _VIEWS or (node.target is getattr and node.args[1] in _VIEW_ATTRIBUTES)
    return node.op != "placeholder" and is_known and len(node.all_input_nodes) == 1


def _has_known_gradient(call: ProductCall, values: dict[fx.Node, Any]) -> bool:
    input, weight, product = values[call.input], values[call.weight], call.product
    for value in (input, weight, values[call.node]):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
            return False
    if product.family in _CONVOLUTIONS:
        is_batched = input.dim() == weight.dim() == product.num_dims
        return is_batched and _convolution_options(call.node, product, weight) is not None
    if weight.dim() == 2:
        return bool(input.dim() > 1)
    is_batch = weight.dim() == input.dim() == 3 and input.size(0) == weight.size(0)
    return bool(is_batch and product.family is not Family.LINEAR)


def _convolution_options(node: fx.Node, product: Product, weight: Tensor) -> ConvolutionOptions | None:
    """The options of a convolution; None for paddings of unequal ends."""
    kwargs = {name: value for name, value in node.kwargs.items() if name != "bias"}
    found = convolution_options(product, weight, node.args[3:], kwargs)
    return None if found is None or found[1] else found[0]
