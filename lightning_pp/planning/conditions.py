"""What a step may go by besides its batch's shapes, values and what it draws: progress, attributes, text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from types import MappingProxyType
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


class Conditions(NamedTuple):
    """What a step may go by besides its batch's shapes, values and what it draws.

    Attributes:
        progress: How far the training is.
        attributes: What the module holds outside of units: a number for the module and a name, to an outline.
        opaque: What the batch holds that its signature says nothing of, such as text.
    """

    progress: Any = None
    attributes: Mapping[tuple[int, str], Any] = MappingProxyType({})
    opaque: tuple[Any, ...] = ()

    def matches(self, others: Conditions, *, with_progress: bool) -> bool:
        """Whether a step has nothing else to go by than it had under ``others``.

        Args:
            others: The other conditions.
            with_progress: Whether the step goes by the training's progress.
        """
        return (
            (not with_progress or self.progress == others.progress)
            and self.attributes == others.attributes
            and self.opaque == others.opaque
        )


NO_CONDITIONS = Conditions()


class AttributesOutsideUnits:
    """The attributes that code between units may go by.

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
            if name not in units and not name.startswith(inside) and not isinstance(child, Metric)
        ]

    def outlines(self) -> dict[tuple[int, str], Any]:
        """What code may branch by in each attribute, by the number of its module and its name."""
        return {
            (number, key): outline_of(value)
            for number, held in enumerate(self._held)
            for key, value in held.items()
            if key not in self._not_the_users
        }


def outline_of(value: Any) -> Any:
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


def opaque_leaves(tree: Any) -> tuple[Any, ...]:
    """What ``tree`` holds that :func:`~lightning_pp.planning.step_plans.signature_of` says nothing of.

    Text and members of an enumeration are given as they are. Another object is equal to none,
    since what is in it may have changed.
    """
    return tuple(
        leaf if isinstance(leaf, (str, bytes, Enum)) else object()
        for leaf in leaves_of(tree)
        if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float)))
    )
