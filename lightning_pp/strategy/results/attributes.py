"""What the user's step keeps on the module: the same after a batch as on one device, on every rank.

``self.validation_step_outputs.append(preds)``, ``self.num_seen += 1`` and the like run once per microbatch, and to
their end on the last stage only. Each microbatch starts from what the module held before the batch; the changes are
merged as outputs are, so a list grows by the batch's entry, a running mean moves by the batch's mean, a counter counts
one; and the last stage's result is given to every rank, since hooks that read it run on all of them. Numbers may also
be in dicts, counters and objects. Tensors and NumPy arrays that a step writes into in place are merged as numbers are.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import numpy as np
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


class _Move(NamedTuple):
    """A number, or a tensor or array that was written in place or has grown, before a change and after it."""

    before: Any
    now: Any

    @property
    def added(self) -> Any:
        """What was added to it, or rows at its end."""
        return self.now[len(self.before) :] if self.has_grown else self.now - self.before

    @property
    def has_grown(self) -> bool:
        """Whether it is an array with more rows."""
        return isinstance(self.now, np.ndarray) and self.now.shape != self.before.shape


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
    numbers = [("", key) for key, value in vars(module).items() if _is_number(value) or type(value) is np.ndarray]
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
        merge = partial(_merge_attribute, num_samples=num_samples, weights=weights, known=self._known)
        return [merge(changes, name) for name, changes in zip(self.names, self._by_attribute(), strict=False)]

    def _by_attribute(self) -> list[list[_Changes]]:
        return list(map(list, zip(*(self._changes[index] for index in sorted(self._changes)), strict=True)))

    def moves(self) -> dict[str, list[Any]]:
        """By name what microbatches have added to a number, tensor or array."""
        found: dict[str, list[Any]] = {}
        for name, changes in zip(self.names, self._by_attribute(), strict=False):
            for path, value in ((path, value) for each in changes for path, value in _values(each, name)):
                if isinstance(value, _Move) and not value.has_grown:
                    found.setdefault(path, []).append(value.added)
        return found

    def values_by_name(self, changes: Sequence[_Changes]) -> dict[str, Any]:
        """What was appended or set, by the name of the attribute or of what it holds."""
        named = zip(self.names, changes, strict=False)
        return {path: value for name, change in named for path, value in _values(change, name)}

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
        self._content = _copied(self._value) if _is_array(self._value) else None
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
            kept = copy.copy(now) if isinstance(now, (list, dict, set)) else _moved(self._value, now)
            changes = {"": ("delete", None) if now is _MISSING else ("set", kept)}
        elif self._content is not None and not _is_same(now, self._content):
            changes = {"": ("set", _Move(self._content, _copied(now)))}
        else:
            changes = {path: _find_change(each) for path, each in self._reached.items() if each.is_changed}
        if of_whole_batch is None:
            return changes
        # what was written in place has been made to stand for the batch, if at all, before it was written
        return {
            path: (kind, value if isinstance(value, _Move) else of_whole_batch(value))
            for path, (kind, value) in changes.items()
        }

    def restore(self) -> None:
        """Undoes what happened."""
        for each in self._reached.values():
            each.restore()
        if self._content is not None and not _is_same(self._value, self._content):
            self._value[...] = self._content  # a write, which autograd would take for one where nothing has changed
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
            elif kind == "set" and self._content is not None and value.shape == self._content.shape:
                self._value[...] = value
            elif kind == "set":
                self._held[self._key] = value


def learn_which_add_up(
    module: nn.Module, whole: Mapping[str, Sequence[Any]], parts: Mapping[str, Sequence[Any]]
) -> None:
    """Notes which numbers add up: a batch adds to them in one piece what it adds in parts."""
    known = _learned.setdefault(module, {})
    for name, moves in whole.items():
        if name in parts and any(np.any(np.asarray(move)) for move in (*moves, *parts[name])):
            known[name] = known.get(name, True) and add_up(moves, parts[name])


def add_up(whole: Sequence[Any] | None, parts: Sequence[Any] | None) -> bool:
    """Whether a number moves by as much for a batch in one piece as for its parts together; None: it did not move."""
    return whole is not None and parts is not None and np.allclose(sum(whole), sum(parts), rtol=1e-4)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_array(value: object) -> bool:
    return (type(value) is Tensor and not is_fake(value)) or type(value) is np.ndarray


def _is_same(value: Any, other: Any) -> bool:
    return torch.equal(value, other) if isinstance(value, Tensor) else np.array_equal(value, other, equal_nan=True)


def _copied(array: Any) -> Any:
    return array.detach().clone() if isinstance(array, Tensor) else array.copy()


def _moved(before: Any, now: Any) -> Any:
    """What a place holds ``now``, as a move if it is a number or an array to which rows were appended."""
    moves = _is_number(before) and _is_number(now)
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray) and len(before) < len(now):
        moves = before.dtype == now.dtype and np.array_equal(before, now[: len(before)])
    return _Move(before, now) if moves else now


def _values(changes: _Changes, name: str) -> Iterator[tuple[str, Any]]:
    """What was appended or set, by the name of what holds it: the attribute ``name``, or something in it."""
    for path, (kind, value) in changes.items():
        if kind == "set keys":
            yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
        else:
            yield path or name, value


def _find_change(reached: Reached) -> tuple[str, Any]:
    """What happened to a container: append (entries), set keys (items), set (the content)."""
    now, before = reached.container, reached.content
    if isinstance(now, dict):
        if before.keys() <= now.keys():
            # of a key that was not there yet, Counter and defaultdict say what was
            make = getattr(now, "default_factory", None) if isinstance(now, defaultdict) else None
            none = 0 if isinstance(now, Counter) else _MISSING if make is None else make()
            new = {key: item for key, item in now.items() if before.get(key, _MISSING) is not item}
            return ("set keys", {key: _moved(before.get(key, none), item) for key, item in new.items()})
    elif not isinstance(now, set):
        number = reached.num_new()
        if number is not None:
            return ("append", list(now)[len(now) - number :])
    return ("set", copy.copy(now))


def _apply(kind: str, value: Any, reached: Reached) -> None:
    if kind == "append":
        reached.container.extend(value)
    elif kind == "set keys":
        dict.update(reached.container, value)  # Counter's own would add
    elif kind == "set":
        reached.set(value)


def _merge_attribute(
    changes: list[_Changes], name: str, *, num_samples: Sequence[int], weights: Sequence[float], known: dict[str, bool]
) -> _Changes:
    """The batch's changes to one attribute, without changes to nothing; ``known`` lists have an entry for a sample."""
    moved = next((each[""][1] for each in changes if isinstance(each.get("", _KEPT)[1], _Move)), None)
    if moved is not None:
        changes = [each or {"": ("set", _Move(moved.before, moved.before))} for each in changes]
    if len({"" in each for each in changes}) > 1:
        return changes[-1]  # set anew in some microbatches only
    paths = dict.fromkeys(path for each in changes for path in each)
    merge = partial(_merge, num_samples=num_samples, weights=weights, known=known)
    return {path: merge(_filled([each.get(path) for each in changes]), path=path or name) for path in paths}


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
            moved = next((value[key] for value in values if isinstance(value.get(key), _Move)), None)
            if moved is not None:
                values = [value if key in value else {**value, key: _Move(*moved[:1] * 2)} for value in values]
            own = [index for index, value in enumerate(values) if key in value]
            of_key = [("append" if type(values[index][key]) is list else "set", values[index][key]) for index in own]
            shares = [num_samples[index] for index in own], [weights[index] for index in own]
            merged[key] = _merge(of_key, *shares, known, f"{path}[{key!r}]")[1]
        return (kind, merged)
    if all(isinstance(value, _Move) for value in values):
        siblings = {adds_up for name, adds_up in known.items() if name.startswith(path.rpartition("[")[0] + "[")}
        adds_up = known.get(path, True if siblings == {True} else None)  # as other keys of a counter
        return (kind, _merged_moves(values, num_samples, weights, adds_up))
    values = [value.now if isinstance(value, _Move) else value for value in values]
    if all(isinstance(value, set) for value in values):
        return (kind, set[Any]().union(*values))
    if _all_equal(values):  # a value that the samples do not change, a cache, has no row per sample
        return (kind, values[0])
    return (kind, merge_outputs(values, num_samples, weights))


def _merged_moves(
    moves: Sequence[_Move], num_samples: Sequence[int], weights: Sequence[float], adds_up: bool | None
) -> Any:
    """What a batch made of a number: all moves if they add up, else their mean, or the last one's of whole numbers."""
    added = [move.added for move in moves]
    if any(move.has_grown for move in moves):
        return np.concatenate([moves[0].before, *(move.added for move in moves if move.has_grown)])
    are_integers = all(np.all(np.asarray(each) % 1 == 0) for each in added)
    if adds_up or (adds_up is None and are_integers and not _all_equal(added)):
        return moves[0].before + sum(added)
    if are_integers:
        return moves[-1].now
    if _is_number(moves[0].now):
        return merge_outputs([move.now for move in moves], num_samples, weights)
    return moves[0].before + sum(each * share for each, share in zip(added, weights, strict=True))


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
