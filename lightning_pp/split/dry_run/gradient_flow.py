"""The unit outputs to which a gradient flows, read off the autograd graph without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_pp.split.data.tree import tensors_of
from lightning_pp.split.record.step_record import Value


def values_reached(tree: Any, markers: Mapping[Value, Any]) -> frozenset[Value]:
    """The values that the tensors in ``tree`` differentiably depend on; see :func:`gradient_sources`."""
    found: frozenset[Value] = frozenset()
    for node in {tensor.grad_fn for tensor in tensors_of(tree) if tensor.grad_fn is not None}:
        found |= gradient_sources({None: node}, markers)[None]
    return found


def gradient_sources(
    roots: Mapping[Value | None, Any], markers: Mapping[Value, Any]
) -> dict[Value | None, frozenset[Value]]:
    """For each root node, the markers that it reaches in the autograd graph without passing another marker.

    Args:
        roots: Autograd nodes to start from: that of the loss (key ``None``) and those of the unit outputs.
        markers: The autograd node that each unit output has to itself.

    Returns:
        For each root, the values it differentiably depends on.
    """
    value_of_node = {node: value for value, node in markers.items()}
    reached: dict[Value | None, frozenset[Value]] = {}
    for root, node in roots.items():
        found: set[Value] = set()
        visited = {node}
        if root is None and node in value_of_node:  # the loss is itself a unit output
            reached[root] = frozenset({value_of_node[node]})
            continue
        waiting = [node]
        while waiting:
            for following, _ in waiting.pop().next_functions:
                if following is None or following in visited:
                    continue
                visited.add(following)
                if following in value_of_node:
                    found.add(value_of_node[following])
                else:
                    waiting.append(following)
        reached[root] = frozenset(found)
    return reached
