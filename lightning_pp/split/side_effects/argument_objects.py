"""Objects among the arguments of a unit call that are neither tensors nor containers, such as caches of keys."""

from __future__ import annotations

import copy
from collections import deque
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque)
# Not the state of anything that one call hands to the next.
_OPAQUE = (Tensor, nn.Module, ModuleType, type)


def attributes_of(node: Any) -> dict[str, Any] | None:
    """The attributes of an object that may be the state of something; None for tensors, modules, functions."""
    if isinstance(node, _OPAQUE) or callable(node):
        return None
    return getattr(node, "__dict__", None)


class ArgumentObjects:
    """The state of the objects in the arguments of a call, and of all that they hold, as it is now.

    A unit may be run more than once, in a dry run or in backward, and a cache that grew in the first run would be too
    long in the next. What tensors hold is not kept.

    Args:
        arguments: Any nesting of containers and objects.
        with_containers: Whether containers are kept that no object holds.
    """

    def __init__(self, arguments: Any, *, with_containers: bool = False) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._visit(arguments, with_containers)

    def restore(self) -> None:
        """Puts every attribute back, and every entry of every container that an object holds."""
        for attributes, before in self._attributes:
            if attributes.keys() != before.keys() or any(attributes[key] is not before[key] for key in before):
                attributes.clear()
                attributes.update(before)
        for container, content in self._contents:
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else container.update(content)

    def _visit(self, arguments: Any, with_containers: bool) -> None:
        waiting = [(arguments, with_containers)]
        seen: set[int] = set()
        while waiting:
            node, in_object = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, (tuple, *_CONTAINERS)):
                if in_object and isinstance(node, _CONTAINERS):
                    self._contents.append((node, copy.copy(node)))
                children = node.values() if isinstance(node, dict) else node
                waiting += ((child, in_object) for child in children)
            elif (attributes := attributes_of(node)) is not None:
                self._attributes.append((attributes, dict(attributes)))
                waiting += ((child, True) for child in attributes.values())
