"""State that the user's step keeps on the module: after a batch it is as on one device, on every rank.

``self.validation_step_outputs.append(preds)``, ``self.num_seen += 1`` and the like run once per microbatch, and to
their end on the last stage only. Each microbatch starts from what the module held before the batch; the changes are
merged as outputs are, so a list grows by the batch's entry, a running mean moves by the batch's mean, a counter counts
one; and the last stage's result is given to every rank, since hooks that read it run on all of them.

A change stands at a place: a container (a module's or an object's attributes, a dict, a list) and a key in it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pp.split._torch_private import buffers_of
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.reductions.scaling import keeping_counts
from lightning_pp.split.side_effects.reach import Reached, class_containers, reached_from
from lightning_pp.strategy.results.changes import Absent, Move, Rows, changes_in, changes_of_items, merged_change
from lightning_pp.strategy.results.learned import Learned, is_number
from lightning_pp.strategy.results.outputs import all_equal

_LIGHTNINGS_OWN = frozenset(vars(pl.LightningModule()))
_MOST_ENTRIES = 1000
_Place = tuple[str, Any]
"""The path of a container and a key in it; None for all that it holds."""
Changes = dict[_Place, Any]


def small_state(module: nn.Module) -> list[tuple[str, str]]:
    """What a step may write into, in ``(module name, attribute)``: all that holds up to 1,000 entries or elements."""
    found: list[tuple[str, str]] = []
    for name, child in module.named_modules():
        if type(child).__module__.startswith("torch."):
            continue
        for key, value in (*vars(child).items(), *buffers_of(child).items()):
            reached = () if key in _LIGHTNINGS_OWN else reached_from(value, key)
            size = value.numel() if isinstance(value, Tensor) else sum(len(each.content) for each in reached)
            if size <= _MOST_ENTRIES and (reached or isinstance(value, Tensor)):
                found.append((name, key))
    return found


def kept_by_step(
    module: nn.Module, mutated: Sequence[tuple[str, str]], units: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Of the ``(module name, attribute)`` that a dry run saw change, those that this module looks after.

    Metrics look after themselves, and what lies inside a unit belongs to its stage. Numbers of the module, also in
    dicts and short lists, are among them in any case: a count of made-up values may be 0.
    """
    prefixes = tuple(unit + "." for unit in units)
    numbers = [("", key) for key, value in vars(module).items() if type(value) is np.ndarray or _has_number(value)]
    return tuple(
        (name, attribute)
        for name, attribute in dict.fromkeys([*mutated, *numbers])
        if attribute not in _LIGHTNINGS_OWN
        and name not in units
        and not name.startswith(prefixes)
        and not isinstance(module.get_submodule(name), Metric)
    )


class StepAttributes:
    """The attributes that one batch's steps change.

    Args:
        module: The user's module.
        places: Module names and attributes, as :func:`kept_by_step` returns them.
        learned: What is known of the values that the module's steps leave.
        with_new: Whether attributes that the step adds to the module itself are among them.

    Attributes:
        are_changed: Whether a dry run saw the step change one of them.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[tuple[str, str]],
        learned: Learned,
        *,
        are_changed: bool = False,
        with_new: bool = False,
    ) -> None:
        self.places, self.learned, self.are_changed = places, learned, are_changed
        self._holders: dict[str, _Attributes | Reached] = {}
        seen: set[int] = set()
        names = [name for name, _ in places]
        for name in dict.fromkeys(["", *names] if with_new else names):
            keys = [key for other, key in places if other == name]
            own = _Attributes(name, module.get_submodule(name), keys, with_new=with_new and not name)
            found = [each for each in own.reached() if id(each.container) not in seen]
            self._holders |= {name: own, **{each.path: each for each in found}}
            seen.update(id(each.container) for each in found)
        self._changes: dict[int, Changes] = {}

    def __bool__(self) -> bool:
        """Whether the step may change any."""
        return bool(self._holders)

    @contextmanager
    def of_microbatch(
        self, microbatch: int, of_whole_batch: Callable[[Any], Any] | None, *, active: bool
    ) -> Iterator[None]:
        """Around one microbatch's step; its changes are noted if ``active`` and undone in any case.

        Args:
            microbatch: Its index.
            of_whole_batch: Makes values stand for the whole batch; None: they do.
            active: Whether the changes count.
        """
        for holder in self._holders.values():
            if isinstance(holder, _Attributes):
                holder.begin()
        try:
            yield
            if active:
                make = of_whole_batch or (lambda value: value)
                self._changes[microbatch] = {
                    (path, key): change
                    for path, each in self._holders.items()
                    for key, change in (each.changes(make) if isinstance(each, _Attributes) else changes_in(each, make))
                }
        finally:
            for holder in self._holders.values():
                holder.restore()

    def merged(self, num_samples: Sequence[int], weights: Sequence[float]) -> Changes:
        """The batch's changes, from the microbatches'."""
        self.learned.unknown.clear()
        parts = [self._changes[index] for index in sorted(self._changes)]
        merge = partial(merged_change, num_samples=num_samples, weights=weights, learned=self.learned)
        return {
            place: merge([part.get(place, Absent.UNCHANGED) for part in parts], name=self._name(place))
            for place in dict.fromkeys(place for part in parts for place in part)
        }

    def values_by_name(self, changes: Changes) -> dict[str, Any]:
        """The appended or set values, by the name of the attribute or of the entry in it."""
        return {
            self._name(place): change.value if isinstance(change, (Move, Rows)) else change
            for place, change in changes.items()
        }

    def _name(self, place: _Place) -> str:
        path, key = place
        if isinstance(self._holders[path], _Attributes):
            return f"{path}.{key}".lstrip(".")
        return path if key is None else f"{path}[{key!r}]"

    def apply(self, changes: Changes) -> None:
        """Makes ``changes``, the last stage's, on this rank."""
        self.learned.warn_of_unknown()
        for (path, key), change in sorted(changes.items(), key=lambda item: item[0][1] is None):
            holder = self._holders[path]
            if key is not None:
                held = holder.buffers if isinstance(holder, _Attributes) and key in holder.buffers else holder.container
                _put(held, key, change)
            elif isinstance(change, Rows):
                holder.container.extend(change.value)
            elif isinstance(holder, Reached):
                holder.set(change)


class _Attributes:
    """Attributes and buffers ``keys`` of a module before the batch. Each step gets copies of tensors and arrays."""

    def __init__(self, name: str, module: nn.Module, keys: Sequence[str], *, with_new: bool) -> None:
        self._name = name
        self._known_keys, self._with_new, self._old = keys, with_new, set[str]()
        self.buffers = buffers_of(module)
        self.container: Any = ChainMap(vars(module), self.buffers)
        self._of_class = class_containers(type(module))
        self._before = {key: self.container[key] for key in keys if key in self.container}
        self._copies: dict[str, Any] = {}
        for value in self._before.values():
            if isinstance(value, Tensor):
                keeping_counts(value)  # for rehearsals, which copy it

    @property
    def _keys(self) -> Sequence[str]:
        new = self.container.maps[0].keys() - self._old if self._with_new and self._old else ()
        return [*self._known_keys, *(key for key in new if not key.startswith("_"))]

    def reached(self) -> Iterator[Reached]:
        """The containers and objects that are reached from them."""
        for key in self._keys:
            value = self._before.get(key, self._of_class.get(key))
            yield from reached_from(value, f"{self._name}.{key}".lstrip("."))

    def begin(self) -> None:
        """A step begins."""
        self._old = set(self.container.maps[0])
        arrays = {key: value for key, value in self._before.items() if type(value) in (Tensor, np.ndarray)}
        self._copies = {key: _copied(value) for key, value in arrays.items() if not is_fake(value)}
        for key, copy in self._copies.items():
            self._set(key, copy)

    def _set(self, key: str, value: Any) -> None:
        _put(self.buffers if key in self.buffers else self.container, key, value)

    def changes(self, of_whole_batch: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
        """By name what became of them."""
        now = {key: self.container[key] for key in self._keys if key in self.container}
        own = {key: copy for key, copy in self._copies.items() if now.get(key) is copy}
        yield from changes_of_items(self._before, {**now, **{key: self._before[key] for key in own}}, of_whole_batch)
        for key, copy in own.items():
            if not all_equal([self._before[key], copy]):
                # it was made to stand for the batch, if at all, before it was written
                yield key, Move(self._before[key], copy.detach() if isinstance(copy, Tensor) else copy, in_place=True)

    def restore(self) -> None:
        """Undoes what happened."""
        for key in self._keys:
            before = self._before.get(key, Absent.DELETED)
            if self.container.get(key, Absent.DELETED) is not before:
                self._set(key, before)


def _has_number(value: Any) -> bool:
    held = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    inner = (item for each in held[:_MOST_ENTRIES] if isinstance(each, dict) for item in each.values())
    return len(held) <= _MOST_ENTRIES and any(map(is_number, (*held, *inner)))


def _put(held: Any, key: Any, change: Any) -> None:
    if change is Absent.DELETED:
        held.pop(key, None)
    elif isinstance(change, Move):
        held[key][...] = change.value
    elif isinstance(change, Rows):
        is_list = isinstance(before := held.get(key, []), list)
        held[key] = [*before, *change.value] if is_list else np.concatenate([before, change.value])
    else:
        held[key] = change


def _copied(array: Any) -> Any:
    return keeping_counts(array.detach().clone()) if isinstance(array, Tensor) else array.copy()
