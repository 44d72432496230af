"""What a step may depend on besides its batch: the training's progress, and attributes of the module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pp.split.data.tree import leaves_of

_USERS = {"_modules", "_buffers", "training"}
# what the package and torch set on modules themselves
_NOT_THE_USERS = {*vars(nn.Module()), "_split_by_pipeline", "_compiled_call_impl", "forward"}
_PLAIN = (type(None), bool, int, float, str)
# of a longer list or dict the length is compared, for looking at every entry would cost more than a step
_MOST_ENTRIES = 256


class StepState(NamedTuple):
    """What a step may depend on besides its batch.

    Attributes:
        progress: How far the training is.
        attributes: The version of the attributes outside units; see :class:`AttributesOutsideUnits`.
    """

    progress: Any = None
    attributes: int = 0

    def matches(self, other: StepState, *, with_progress: bool) -> bool:
        """Whether nothing has changed since ``other``; progress counts if ``with_progress``."""
        return self.attributes == other.attributes and (not with_progress or self.progress == other.progress)


INITIAL_STATE = StepState()
NO_STATE = StepState(attributes=-1)  # which no step is ever in


class AttributesOutsideUnits:
    """Watches the attributes that code between units may read.

    Args:
        module: The whole model.
        units: Its units, whose insides do not count.
        not_the_users: Names of attributes that are set by others than the user's code.
    """

    def __init__(self, module: nn.Module, units: Mapping[str, nn.Module], not_the_users: Collection[str] = ()) -> None:
        inside = tuple(f"{unit}." for unit in units)
        self._not_the_users = (_NOT_THE_USERS | set(not_the_users)) - _USERS
        self._held = [
            child.__dict__
            for name, child in module.named_modules()
            if name not in units and not name.startswith(inside) and Metric not in type(child).__mro__
        ]
        self._outlines: dict[tuple[int, str], Any] = {}
        self._version = 0

    def version(self) -> int:
        """A number that grows when any of the attributes has changed since the last call."""
        outlines = {
            (number, key): branch_outline(value)
            for number, held in enumerate(self._held)
            for key, value in held.items()
            if key not in self._not_the_users
        }
        if outlines != self._outlines:
            self._outlines = outlines
            self._version += 1
        return self._version


def branch_outline(value: Any) -> Any:
    """What code may branch by in ``value``: plain values, shapes of tensors, the same in lists and dicts.

    Of a list or dict in another, and of any other object, it is which object it is.
    """
    if isinstance(value, dict):
        if len(value) <= _MOST_ENTRIES:
            return tuple((_outline_of_entry(key), _outline_of_entry(entry)) for key, entry in value.items())
        return len(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(map(_outline_of_entry, value)) if len(value) <= _MOST_ENTRIES else len(value)
    return _outline_of_entry(value)


def _outline_of_entry(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    return value.shape if isinstance(value, Tensor) else id(value)


def holds_objects(tree: Any) -> bool:
    """Whether ``tree`` holds anything that its signature does not describe, such as text."""
    return any(not (leaf is None or isinstance(leaf, (Tensor, bool, int, float))) for leaf in leaves_of(tree))
