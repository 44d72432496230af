"""What depends on what in a step, found by plain autograd and by trying: the yardstick of the dry run's record.

Every unit call is made to return a stored value, whatever it is given. Then what a later call is given depends on that
value by way of the code between the two alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from one_process import logging_to, loss_of
from torch import Tensor, nn

from lightning_pp.split.data.tree import leaves_of, replace_leaves, tensors_of
from lightning_pp.split.record.step_record import Value

# None is the end of the step.
Consumer = int | None


@dataclass
class Flow:
    """By consumer, the values and parameters that reach it: with a gradient, and at all."""

    gradients: dict[Consumer, set[Value]] = field(default_factory=dict)
    values: dict[Consumer, set[Value]] = field(default_factory=dict)
    parameters: dict[Consumer, set[str]] = field(default_factory=dict)


@contextmanager
def _calls(units: Mapping[str, nn.Module], handler: Callable[[str, Any, Any], Any]) -> Iterator[None]:
    """Every unit's ``forward`` goes to ``handler(name, forward, given)``."""
    for name, unit in units.items():
        forward = unit.forward
        unit.forward = lambda *args, name=name, forward=forward, **kwargs: handler(  # type: ignore[method-assign]
            name, forward, (args, kwargs)
        )
    try:
        yield
    finally:
        for unit in units.values():
            del unit.forward


def reference_flow(module: nn.Module, units: Mapping[str, nn.Module], batch: Any) -> Flow:
    """The flow of one training step of ``module`` on ``batch``."""
    outputs: list[Any] = []
    running = False

    def store(name: str, forward: Callable[..., Any], given: Any) -> Any:
        nonlocal running
        args, kwargs = given
        if running:
            return forward(*args, **kwargs)
        running = True
        try:
            outputs.append(forward(*args, **kwargs))
        finally:
            running = False
        return outputs[-1]

    def run(handler: Callable[[str, Any, Any], Any]) -> list[Tensor]:
        ends: list[Tensor] = []
        with _calls(units, handler), logging_to(module, lambda _, value: ends.extend(tensors_of(value))):
            result = module.training_step(batch)  # type: ignore[operator]
        return [loss_of(result), *ends, *tensors_of(result)]

    run(store)
    stored = [[_leaf(leaf) for leaf in leaves_of(output)] for output in outputs]

    def frozen_run(values: list[list[Any]]) -> dict[Consumer, list[Tensor]]:
        """What each call and the end are given when every call returns ``values``."""
        given_to: dict[Consumer, list[Tensor]] = {}

        def replay(name: str, forward: Callable[..., Any], given: Any) -> Any:
            index = len(given_to)
            given_to[index] = [tensor.clone() for tensor in tensors_of(given)]
            return replace_leaves(outputs[index], [_used(leaf) for leaf in values[index]])

        end = run(replay)
        return {**given_to, None: end}

    flow = Flow()
    given_to = frozen_run(stored)
    values = {
        Value(call, place): leaf
        for call, leaves in enumerate(stored)
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
    }
    names = {parameter: name for name, parameter in module.named_parameters()}
    differentiable = {value: leaf for value, leaf in values.items() if leaf.requires_grad}
    for consumer, tensors in given_to.items():
        differentiated = tensors[:1] if consumer is None else tensors
        flow.gradients[consumer] = _reached(differentiated, differentiable)
        flow.parameters[consumer] = set()
        flow.values[consumer] = set()
    for value, leaf in values.items():
        for alternative in _alternatives(leaf):
            changed = [list(leaves) for leaves in stored]
            changed[value.call][value.leaf] = alternative
            for consumer in _differing(frozen_run(changed), given_to):
                flow.values[consumer].add(value)
    for parameter, name in names.items():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(_changed(before))
        for consumer in _differing(frozen_run(stored), given_to):
            flow.parameters[consumer].add(name)
        with torch.no_grad():
            parameter.copy_(before)
    return flow


def _differing(given: Mapping[Consumer, list[Tensor]], before: Mapping[Consumer, list[Tensor]]) -> list[Consumer]:
    return [
        consumer
        for consumer, tensors in given.items()
        if any(not torch.equal(one, other) for one, other in zip(tensors, before[consumer], strict=True))
    ]


def _leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    copy = leaf.detach().clone()
    return copy.requires_grad_(leaf.requires_grad)


def _used(leaf: Any) -> Any:
    """May be edited in place."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _alternatives(leaf: Tensor) -> list[Tensor]:
    return [torch.zeros_like(leaf).requires_grad_(leaf.requires_grad), _changed(leaf)]


def _changed(leaf: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if leaf.dtype is torch.bool:
        return ~leaf
    if not leaf.is_floating_point():
        return (leaf + 1) % 2
    noise = torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype)
    return (leaf.detach() + noise).requires_grad_(leaf.requires_grad)


def _reached(tensors: list[Tensor], sources: Mapping[Any, Tensor]) -> set[Any]:
    """The sources that the tensors' gradients flow to."""
    roots = [tensor for tensor in tensors if tensor.requires_grad]
    if not roots or not sources:
        return set()
    weights = [torch.ones_like(root) for root in roots]
    gradients = torch.autograd.grad(roots, list(sources.values()), weights, allow_unused=True, retain_graph=True)
    return {source for source, gradient in zip(sources, gradients, strict=True) if gradient is not None}
