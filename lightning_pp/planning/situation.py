"""What a step may go by besides its batch's shapes and what it draws: the training's progress, attributes, text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning.pytorch as pl
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pp.split.data.tree import leaves_of
from lightning_pp.split.record.step_record import StepRecord

# what was another in so many batches, and the step went on as before, is taken not to matter
SETTLED_AFTER = 8
_PROGRESS = (-1, "progress")
_NOT_THE_USERS = (frozenset(vars(pl.LightningModule())) - {"_modules", "training"}) | {
    "_split_by_pipeline",
    "_compiled_call_impl",
    "forward",
}


class Situation(NamedTuple):
    """What a step may go by besides its batch and what it draws.

    Attributes:
        progress: How far the training is.
        attributes: What the module holds outside of units: a number for the module and a name, to an outline.
        is_opaque: Whether the batch holds what its signature says nothing of, such as text.
    """

    progress: Any = None
    attributes: Mapping[tuple[int, str], Any] = MappingProxyType({})
    is_opaque: bool = False


NO_SITUATION = Situation()


class Surroundings:
    """Looks at what the steps of a module may go by, until it has shown that they do not.

    Args:
        module: The whole model.
        units: Its units, whose insides do not count.
    """

    def __init__(self, module: nn.Module, units: Mapping[str, nn.Module]) -> None:
        inside = tuple(f"{unit}." for unit in units)
        self._outside = [
            child.__dict__
            for name, child in module.named_modules()
            if name not in units and not name.startswith(inside) and not isinstance(child, Metric)
        ]
        # how often an attribute was another and the step went on as before
        self._changed: Counter[tuple[int, str]] = Counter()
        self._looked_at: list[tuple[tuple[int, str], dict[str, Any]]] = []
        self._num_attributes = -1

    def situation(self, batch: Any, progress: Any) -> Situation:
        """What the steps of ``batch`` may go by, where the training has come to ``progress``."""
        num_attributes = sum(map(len, self._outside))
        if num_attributes != self._num_attributes:
            self._num_attributes = num_attributes
            self._looked_at = [
                ((place, key), held)
                for place, held in enumerate(self._outside)
                for key in held
                if key not in _NOT_THE_USERS and self._changed[place, key] < SETTLED_AFTER
            ]
        attributes = {}
        for place, held in self._looked_at:
            value = held.get(place[1])
            attributes[place] = _OUTLINES.get(type(value), id)(value)
        return Situation(progress, attributes, _is_opaque(batch))

    def others(self, record: StepRecord, before: Situation, now: Situation) -> set[tuple[int, str]]:
        """Attributes that are others than when a step last went as ``record`` says; progress counts as one."""
        if before is now:
            return set()
        others = {
            place
            for place in before.attributes.keys() | now.attributes.keys()
            if before.attributes.get(place) != now.attributes.get(place) and self._changed[place] < SETTLED_AFTER
        }
        asked = record.asked_of_progress
        if (
            asked
            and before.progress != now.progress
            and not (
                self._changed[_PROGRESS] >= SETTLED_AFTER and all(is_as_then(now.progress) for is_as_then in asked)
            )
        ):
            others.add(_PROGRESS)
        return others

    def note_without_effect(self, others: Collection[tuple[int, str]], record: StepRecord, now: Situation) -> None:
        """Notes that a step went as ``record`` says, although ``others`` have changed since the last that did."""
        if others:
            self._changed.update(others)
            self._num_attributes = -1  # some may not be looked at any longer
        if _PROGRESS in others:  # what has another answer by now did not decide
            asked = record.asked_of_progress
            asked[:] = [is_as_then for is_as_then in asked if is_as_then(now.progress)] or [_is_asked]


def _is_asked(progress: Any) -> bool:
    """A question that any progress answers alike."""
    return True


def _is_opaque(tree: Any) -> bool:
    """Whether ``tree`` holds what :func:`signature_of` says nothing of, and shapes may hang on."""
    return any(not (leaf is None or isinstance(leaf, (Tensor, bool, int, float))) for leaf in leaves_of(tree))


def _itself(value: Any) -> Any:
    return value


def _outline_of_dict(value: dict[Any, Any]) -> Any:
    is_of_modules = value and isinstance(next(iter(value.values())), nn.Module)
    return tuple(map(id, value.values())) if is_of_modules else len(value)


# what code may branch by in an attribute's value; of other types, which object it is
_OUTLINES: Mapping[type, Callable[[Any], Any]] = {
    **dict.fromkeys((type(None), bool, int, float, str), _itself),
    **dict.fromkeys((list, tuple, set), len),
    dict: _outline_of_dict,
    Tensor: lambda tensor: tensor.shape,
}
