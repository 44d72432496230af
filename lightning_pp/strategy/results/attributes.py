"""What the user's step keeps on the module: the same after a batch as on one device, on every rank.

``self.validation_step_outputs.append(preds)``, ``self.num_seen += 1`` and the like run once per microbatch, and to
their end on the last stage only. Each microbatch starts from what the module held before the batch; the changes are
merged as outputs are, so a list grows by the batch's entry, a running mean moves by the batch's mean, a counter counts
one; and the last stage's result is given to every rank, since hooks that read it run on all of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.side_effects.reach import Reached, class_containers, reached_from
from lightning_pp.strategy.results.outputs import merge_outputs

# by path: whether a list gets an entry for each sample, and whether the parts of a batch add up in a number
_learned: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()
_LIGHTNINGS_OWN = frozenset(vars(pl.LightningModule()))
_MISSING = object()

# by path: what kind of change, and with what
_Changes = dict[str, tuple[str, Any]]
_KEPT: tuple[str, Any] = ("keep", None)
_NOTHING: dict[str, tuple[str, Any]] = {"append": ("append", []), "set keys": ("set keys", {})}


def kept_by_step(
    module: nn.Module, mutated: Sequence[tuple[str, str]], units: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Of the ``(module name, attribute)`` that a dry run saw change, those that this module looks after.

    Metrics look after themselves, and what lies inside a unit belongs to its stage. Numbers of the module are among
    them in any case: a count of made-up values may be 0.
    """
    prefixes = tuple(unit + "." for unit in units)
    numbers = [("", attribute) for attribute, value in vars(module).items() if _is_number(value)]
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
        names: Module names and attributes, as :func:`kept_by_step` returns them.

    Attributes:
        names: Of the attributes, dotted.
        places: The module names and attributes.
    """

    def __init__(self, module: nn.Module, names: Sequence[tuple[str, str]]) -> None:
        self.places = names
        self.names = [f"{name}.{attribute}" if name else attribute for name, attribute in names]
        self._attributes: list[_Attribute] = []
        self._known = _learned.setdefault(module, {})
        seen: set[int] = set()
        for (name, attribute), dotted in zip(names, self.names, strict=True):
            self._attributes.append(_Attribute(module.get_submodule(name), attribute, dotted, seen))
        self._changes: dict[int, list[_Changes]] = {}

    @contextmanager
    def of_microbatch(
        self, microbatch: int, of_whole_batch: Callable[[Any], Any] | None = None, *, active: bool
    ) -> Iterator[None]:
        """Around one microbatch's step; its changes are noted if ``active`` and undone in any case.

        Args:
            microbatch: Its index.
            of_whole_batch: Makes values stand for the whole batch.
            active: Whether the changes count.
        """
        try:
            yield
            if active and self._attributes:
                self._changes[microbatch] = [each.changes(of_whole_batch) for each in self._attributes]
        finally:
            for each in self._attributes:
                each.restore()

    def merged(self, num_samples: Sequence[int], weights: Sequence[float]) -> list[_Changes]:
        """The batch's changes, from the microbatches'."""
        if not self._changes:
            return []
        found = []
        for name, changes in zip(self.names, self._by_attribute(), strict=False):
            if any(map(_is_move, changes)):
                changes = self._merged_numbers(name, changes)
            found.append(_merge_attribute(changes, num_samples, weights, self._known))
        return found

    def _by_attribute(self) -> list[list[_Changes]]:
        return list(map(list, zip(*(self._changes[index] for index in sorted(self._changes)), strict=True)))

    def _merged_numbers(self, name: str, changes: list[_Changes]) -> list[_Changes]:
        """What microbatches made of a number: the batch's for each, if they add up, or the last one's of integers."""
        before, moves = _moves(changes)
        adds_up, are_integers = self._known.get(name), all(isinstance(move, int) for move in moves)
        if adds_up or (adds_up is None and are_integers and len(set(moves)) > 1):
            return [{"": ("set", before + sum(moves))}] * len(moves)
        values = [each[""][1][1] if _is_move(each) else before for each in changes]
        return [{"": ("set", values[-1] if are_integers else value)} for value in values]

    def moves(self) -> dict[str, list[float]]:
        """By name what each microbatch has added to a number."""
        named = zip(self.names, self._by_attribute(), strict=False)
        return {name: _moves(changes)[1] for name, changes in named if any(map(_is_move, changes))}

    def values_by_name(self, changes: Sequence[_Changes]) -> dict[str, Any]:
        """What was appended or set, by the name of the attribute or of what it holds."""
        named = zip(self.names, changes, strict=False)
        return {path or name: value for name, change in named for path, (_, value) in change.items()}

    def apply(self, changes: Sequence[_Changes]) -> None:
        """Makes ``changes``, the last stage's, on this rank."""
        for change, attribute in zip(changes, self._attributes, strict=False):
            attribute.apply(change)


class Left(NamedTuple):
    """What a step has left in attributes and buffers, without having been kept; can be sent to other ranks.

    Attributes:
        places: Module names and attributes.
        changes: Of each, as :meth:`StepAttributes.merged` returns them.
        buffers: Those of a stage that it wrote into, as float64.
    """

    places: Sequence[tuple[str, str]]
    changes: Sequence[_Changes]
    buffers: Mapping[str, Tensor]

    def apply(self, module: nn.Module) -> None:
        """Makes the changes."""
        StepAttributes(module, self.places).apply(self.changes)
        for name, buffer in module.named_buffers():
            if name in self.buffers and not is_fake(buffer):
                buffer.copy_(self.buffers[name])


class _Attribute:
    """One attribute before the batch, with all that is reached from it and can change.

    Args:
        module: Whose attribute it is, or its class's.
        key: Its name.
        dotted: Its name for the user.
        seen: Identities of what other attributes have; what is found is added.
    """

    def __init__(self, module: nn.Module, key: str, dotted: str, seen: set[int]) -> None:
        self._held = vars(module)
        self._key = key
        self._value = self._held.get(key, _MISSING)
        of_class = class_containers(type(module)).get(key, _MISSING)
        start = of_class if self._value is _MISSING else self._value
        found = [each for each in reached_from(start, dotted) if id(each.container) not in seen]
        seen.update(id(each.container) for each in found)
        self._reached = {each.path: each for each in found}

    def changes(self, of_whole_batch: Callable[[Any], Any] | None = None) -> _Changes:
        """What happened, by path; under ``""`` to the attribute itself, if it is another object now, or gone."""
        now = self._held.get(self._key, _MISSING)
        if now is not self._value:
            # the content of a container may be put back
            kept = copy.copy(now) if isinstance(now, (list, dict, set)) else now
            changes = {"": ("delete", None) if now is _MISSING else ("set", kept)}
            if _is_number(now) and _is_number(self._value):
                changes = {"": ("move", (self._value, now))}
        else:
            changes = {path: _find_change(each) for path, each in self._reached.items() if each.is_changed}
        if of_whole_batch is None:
            return changes
        return {path: (kind, of_whole_batch(value)) for path, (kind, value) in changes.items()}

    def restore(self) -> None:
        """Undoes what happened."""
        for each in self._reached.values():
            each.restore()
        if self._value is _MISSING:
            self._held.pop(self._key, None)
        else:
            self._held[self._key] = self._value

    def apply(self, changes: _Changes) -> None:
        """Makes changes, in the same objects where those are still there."""
        for path, (kind, value) in changes.items():
            if path:
                _apply(kind, value, self._reached[path])
            elif kind == "delete":
                self._held.pop(self._key, None)
            elif kind == "set" and isinstance(value, list) and isinstance(self._value, list):
                self._value[:] = value
            elif kind == "set":
                self._held[self._key] = value


def learn_which_add_up(
    module: nn.Module, whole: Mapping[str, Sequence[float]], parts: Mapping[str, Sequence[float]]
) -> None:
    """Notes which numbers add up: a batch adds to them in one piece what it adds in parts."""
    known = _learned.setdefault(module, {})
    for name, moves in whole.items():
        if name in parts and any((*moves, *parts[name])):
            known[name] = known.get(name, True) and add_up(moves, parts[name])


def add_up(whole: Sequence[float] | None, parts: Sequence[float] | None) -> bool:
    """Whether a number moves by as much for a batch in one piece as for its parts together; None: it did not move."""
    return whole is not None and parts is not None and math.isclose(sum(whole), sum(parts), rel_tol=1e-4)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_move(changes: _Changes) -> bool:
    return changes.get("", _KEPT)[0] == "move"


def _moves(changes: Sequence[_Changes]) -> tuple[float, list[float]]:
    """A number before the batch, and what each microbatch has added to it."""
    before = next(each[""][1][0] for each in changes if _is_move(each))
    return before, [each[""][1][1] - before if _is_move(each) else 0 for each in changes]


def _find_change(reached: Reached) -> tuple[str, Any]:
    """What happened to a container: append (entries), set keys (items), set (the content)."""
    now, before = reached.container, reached.content
    if isinstance(now, dict):
        if before.keys() <= now.keys():
            return ("set keys", {key: item for key, item in now.items() if before.get(key, _MISSING) is not item})
    elif not isinstance(now, set):
        number = reached.num_new()
        if number is not None:
            return ("append", list(now)[len(now) - number :])
    return ("set", copy.copy(now))


def _apply(kind: str, value: Any, reached: Reached) -> None:
    if kind == "append":
        reached.container.extend(value)
    elif kind == "set keys":
        reached.container.update(value)
    elif kind == "set":
        reached.set(value)


def _merge_attribute(
    changes: list[_Changes], num_samples: Sequence[int], weights: Sequence[float], known: dict[str, bool]
) -> _Changes:
    """The batch's changes to one attribute, without changes to nothing; ``known`` lists have an entry for a sample."""
    if len({"" in each for each in changes}) > 1:
        return changes[-1]  # set anew in some microbatches only
    paths = dict.fromkeys(path for each in changes for path in each)
    merge = partial(_merge, num_samples=num_samples, weights=weights, known=known)
    return {path: merge(_filled([each.get(path) for each in changes]), path=path) for path in paths}


def _filled(changes: list[tuple[str, Any] | None]) -> list[tuple[str, Any]]:
    """Changes of one container in all microbatches, with what is none for those in which it did not change."""
    kinds = {change[0] for change in changes if change is not None}
    nothing = _NOTHING.get(kinds.pop(), _KEPT) if len(kinds) == 1 else _KEPT
    return [nothing if change is None else change for change in changes]


def _merge(
    changes: list[tuple[str, Any]],
    num_samples: Sequence[int],
    weights: Sequence[float],
    known: dict[str, bool],
    path: str,
) -> tuple[str, Any]:
    kinds = {kind for kind, _ in changes}
    if len(kinds) > 1:
        return changes[-1]
    kind = changes[0][0]
    values = [value for _, value in changes]
    if kind == "append" and _is_by_sample([len(entries) for entries in values], num_samples, known, path):
        return (kind, merge_outputs(values, num_samples, weights))
    if kind == "append" and len({len(entries) for entries in values}) == 1:
        # entry by entry: each microbatch appended its part of what the batch appends
        return (kind, [merge_outputs(list(parts), num_samples, weights) for parts in zip(*values, strict=True)])
    if kind == "append":
        return (kind, [entry for entries in values for entry in entries])
    if kind in ("keep", "delete"):
        return (kind, None)
    if kind == "set keys":
        merged = {}
        for key in dict.fromkeys(key for value in values for key in value):
            own = [index for index, value in enumerate(values) if key in value]
            of_key = [("append" if type(values[index][key]) is list else "set", values[index][key]) for index in own]
            shares = [num_samples[index] for index in own], [weights[index] for index in own]
            merged[key] = _merge(of_key, *shares, known, f"{path}[{key!r}]")[1]
        return (kind, merged)
    if all(isinstance(value, set) for value in values):
        return (kind, set[Any]().union(*values))
    if _all_equal(values):  # a value that the samples do not change, a cache, has no row per sample
        return (kind, values[0])
    return (kind, merge_outputs(values, num_samples, weights))


def _is_by_sample(numbers: list[int], num_samples: Sequence[int], known: dict[str, bool], path: str) -> bool:
    """Whether what is appended has an entry for each sample; of one sample that cannot be seen, and has to be known."""
    is_equal = numbers == list(num_samples)
    if max(num_samples) > 1:
        known[path] = known.get(path, True) and is_equal
    return is_equal and known.get(path, False)


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if isinstance(first, Tensor):
        are_like = all(isinstance(value, Tensor) and value.dtype == first.dtype for value in values)
        return are_like and all(torch.equal(value, first) for value in values[1:])
    try:
        return all(type(value) is type(first) and bool(value == first) for value in values[1:])
    except (RuntimeError, ValueError):  # containers of tensors have no one truth value
        return False
