"""Undoes the changes that the step of a dry run makes to the module."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pp.split._torch_private import (
    BUFFERS,
    COMPILED_CALL,
    HELD_BY_MODULES,
    buffers_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    version_of,
)
from lightning_pp.split.side_effects.containers import ABSENT
from lightning_pp.split.side_effects.generators import restorer
from lightning_pp.split.side_effects.reach import ClassAttributes, Reached, class_containers, reached_from

Changes = Callable[[], list[tuple[str, str, Any]]]

# these belong to torch and Lightning, and no step keeps its results in them
_SKIPPED = frozenset({*HELD_BY_MODULES, "_trainer", COMPILED_CALL, "forward"})
# buffers, hooks and flags, of which none holds containers of the user's
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = frozenset({bool, int, float, str, type(None)})


def preserved_state(module: nn.Module) -> AbstractContextManager[Changes]:
    """In the block, the attributes and buffers of every submodule may change; afterwards all are as before.

    So are the attributes of the users' classes, and the containers and objects that any of these hold, to any depth.

    Yields:
        A function that lists ``(module name, attribute, value)`` for everything changed so far: an attribute set anew,
        or one that holds, at whatever depth, a container or object whose content changed.
    """
    return _preserved(list(module.named_modules()))


class SavedState:
    """What modules hold: attributes, buffers, attributes of their classes, and what any of these hold, to any depth.

    Args:
        modules: By name.
        swaps: Whether copies take the places of tensors and arrays until :meth:`restore`, so that in-place updates
            (batch statistics, counters) go to them. Otherwise originals stay, and are overwritten then.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], *, swaps: bool) -> None:
        self._generators: list[Callable[[], object] | None] = []
        self._originals: list[tuple[Any, Any, int]] = []
        kinds = {type(child) for _, child in modules}
        self._classes, of_classes = ClassAttributes(kinds), {kind: class_containers(kind) for kind in kinds}
        self.entries: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        """Of each module: name, module, attributes, and by attribute the containers of its own and of its class."""
        for name, child in modules:
            attributes, buffers = child.__dict__, buffers_of(child)
            own = {key: value for key, value in attributes.items() if type(value) not in _PLAIN and key not in _SKIPPED}
            self._generators += map(restorer, own.values())
            contents = {key: held for key, value in own.items() if (held := _held_by(key, value))}
            of_class = {
                key: reached_from(value, key) for key, value in of_classes[type(child)].items() if key not in attributes
            }
            self.entries.append((name, child, dict(attributes), contents, of_class))
            arrays = {key: value for key, value in own.items() if type(value) in (Tensor, np.ndarray)}
            real = {key: buffer for key, buffer in buffers.items() if buffer is not None and not buffer.is_meta}
            places: tuple[tuple[Any, dict[str, Any]], ...] = ((buffers, real), (attributes, arrays))
            for place, originals in places:
                copies = {key: _own(value) for key, value in originals.items()}
                if swaps:
                    place.update(copies)
                else:
                    self._originals += ((value, copies[key], _version(value)) for key, value in originals.items())

    def restore(self) -> None:
        """Makes everything as it was."""
        for restore in filter(None, (*self._generators, self._classes.restore)):
            restore()
        for _, child, before, contents, of_class in self.entries:
            for reached in (reached for held in (*contents.values(), *of_class.values()) for reached in held):
                reached.restore()
            _put_back(child.__dict__, before)
        with torch.no_grad():
            for value, copy, version in self._originals:
                if version != _version(value) or version < 0:
                    value[...] = copy


@contextmanager
def _preserved(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[Changes]:
    saved = SavedState(modules, swaps=True)
    working = [dict(child.__dict__) for _, child, *_ in saved.entries]
    users = [each for each in modules if not type(each[1]).__module__.startswith("torch.")]
    own_buffers = [(name, key, copy) for name, child in users for key, copy in buffers_of(child).items()]

    def changes() -> list[tuple[str, str, Any]]:
        changed = []
        for (name, child, before, contents, of_class), at_start in zip(saved.entries, working, strict=True):
            is_new = {key for key, value in child.__dict__.items() if value is not at_start.get(key, ABSENT)}
            is_new.update(key for key, value in at_start.items() if _is_written(value, before.get(key)))
            is_new.update(key for key, held in contents.items() if any(reached.is_changed for reached in held))
            for key, value in child.__dict__.items() if is_new else ():
                is_private = key.startswith("_") and key not in before
                stands_in = callable(value) and callable(getattr(type(child), key, None))  # for a method, as log does
                if key in is_new and not (is_private or key in _SKIPPED or key == BUFFERS or stands_in):
                    changed.append((name, key, value))
            for key, held in of_class.items():
                if any(reached.is_changed for reached in held):
                    changed.append((name, key, held[0].container))
        # buffers of torch's modules are their own business, as in spectral norms
        return changed + [each for each in own_buffers if each[2] is not None and version_of(each[2]) > 0]

    try:
        yield changes
    finally:
        saved.restore()


class StateAroundUnits:
    """Keeps the state of a module while some of its units do not run.

    These units and what only they hold are guarded against what code outside of them does to modules: attributes that
    it sets and forward hooks that it registers. So all of this is quick.
    """

    def __init__(self, module: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self._outside = list(module.named_modules(memo={*units.values()}))
        inside = {child for unit in units.values() for child in unit.modules()}
        inside.difference_update(child for _, child in self._outside)
        self._inside = [child.__dict__ for child in inside]
        self._hooks = [held for child in inside for held in (forward_pre_hooks_of(child), forward_hooks_of(child))]

    @contextmanager
    def preserved(self, note: Callable[[list[tuple[str, str, Any]]], None] | None = None) -> Iterator[Changes]:
        """As :func:`preserved_state`, while code outside of the units may run.

        ``note`` is called at the end with the changes.
        """
        before = [(attributes, attributes.copy()) for attributes in self._inside]
        hooks = [(held, tuple(held)) for held in self._hooks]
        try:
            with _preserved(self._outside) as changes:
                yield changes
                if note is not None:
                    note(changes())
        finally:
            for now, held in before:
                if len(now) != len(held) or any(map(is_not, now.values(), held.values())):
                    _put_back(now, held)
            for registered, keys in hooks:
                for key in set(registered).difference(keys) if len(registered) != len(keys) else ():
                    del registered[key]


def _own(value: Any) -> Any:
    """A copy of a tensor, with the attributes that it has been given, or of an array."""
    if not isinstance(value, Tensor):
        return value.copy()
    copy = value.detach().clone()
    vars(copy).update(vars(value))
    return copy


def _version(value: Any) -> int:
    """That of a tensor; -1 for an array."""
    return version_of(value) if isinstance(value, Tensor) else -1


def _is_written(value: Any, original: Any) -> bool:
    """Whether a tensor or array that was copied from ``original`` has been written into."""
    if type(value) is np.ndarray:
        return not np.array_equal(value, original)
    return type(value) is Tensor and value is not original and version_of(value) > 0


def _held_by(key: str, value: Any) -> Sequence[Reached]:
    """What an attribute of a module holds that can change."""
    if key in _OF_TORCH:
        return (Reached(key, value),) if isinstance(value, dict) else ()
    return () if isinstance(value, (Tensor, nn.Module)) else reached_from(value, key)


def _put_back(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Makes the ``attributes`` of a module what they were ``before``, but for those of torch and Lightning."""
    for key in [key for key in attributes if key not in before and key not in _SKIPPED]:
        del attributes[key]
    attributes.update({key: value for key, value in before.items() if key not in _SKIPPED})


def python_generators() -> tuple[Any, ...]:
    """The state of the generators of Python and NumPy, to compare."""
    state: Any = np.random.get_state()
    _, keys, *rest = state
    return (random.getstate(), keys.tobytes(), *rest)
