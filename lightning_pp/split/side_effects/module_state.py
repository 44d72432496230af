"""Keeping what a step changes on the module from outliving a dry run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.split._torch_private import (
    BUFFERS,
    COMPILED_CALL,
    HELD_BY_MODULES,
    buffers_of,
    forward_hooks_of,
    forward_pre_hooks_of,
)
from lightning_pp.split.side_effects.generators import putting_back
from lightning_pp.split.side_effects.reach import ClassAttributes, Reached, class_containers, reached_from

Changes = Callable[[], list[tuple[str, str, Any]]]

# these belong to torch and Lightning, and no step keeps its results in them
_SKIPPED = frozenset({*HELD_BY_MODULES, "_trainer", COMPILED_CALL, "forward"})
# buffers, hooks and flags, of which none holds containers of the user's
_OF_TORCH = frozenset(vars(nn.Module()))
# most modules have no hooks, and nothing has to be kept of their dicts
_WAS_EMPTY: Sequence[Reached] = [Reached("", {})]


@contextmanager
def preserved_state(module: nn.Module) -> Iterator[Changes]:
    """Within, the attributes and buffers of every submodule may change; afterwards all are as before.

    So are the attributes of the users' classes, and the containers and objects that any of these hold, to any depth.

    Yields:
        A function that lists ``(module name, attribute, value)`` for everything changed so far: an attribute set anew,
        or one that holds, at whatever depth, a container or object whose content changed.
    """
    with _preserved(list(module.named_modules())) as changes:
        yield changes


@contextmanager
def _preserved(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[Changes]:
    saved = []
    generators = [putting_back(value) for _, child in modules for value in child.__dict__.values()]
    kinds = {type(child) for _, child in modules}
    classes, of_classes = ClassAttributes(kinds), {kind: class_containers(kind) for kind in kinds}
    for name, child in modules:
        attributes = child.__dict__
        contents = {key: _held_by(key, value) for key, value in attributes.items() if key not in _SKIPPED}
        of_class = {
            key: reached_from(value, key) for key, value in of_classes[type(child)].items() if key not in attributes
        }
        tensors = {key: value for key, value in attributes.items() if isinstance(value, Tensor) and key not in _SKIPPED}
        saved.append((name, child, dict(attributes), contents, of_class))
        # in-place updates (batch statistics, counters) go to copies
        buffers = buffers_of(child)
        with torch.no_grad():
            for key, buffer in buffers.items():
                if buffer is not None and not buffer.is_meta:
                    buffers[key] = buffer.detach().clone()
            for key, tensor in tensors.items():
                if type(tensor) is Tensor:
                    attributes[key] = tensor.detach().clone()
    working = [dict(child.__dict__) for _, child, *_ in saved]

    def changes() -> list[tuple[str, str, Any]]:
        changed = []
        for (name, child, before, contents, of_class), at_start in zip(saved, working, strict=True):
            for key, value in child.__dict__.items():
                if key.startswith("_") and key not in before:
                    continue
                stands_in = callable(value) and callable(getattr(type(child), key, None))  # for a method, as log does
                if key in _SKIPPED or key == BUFFERS or stands_in:
                    continue
                rebound = key not in before or value is not at_start.get(key)
                if rebound or (key in contents and _is_edited(before[key], contents[key])):
                    changed.append((name, key, value))
            for key, held in of_class.items():
                if _is_edited(held[0].container, held):
                    changed.append((name, key, held[0].container))
        return changed

    try:
        yield changes
    finally:
        for restore in filter(None, (*generators, classes.restore)):
            restore()
        for _, child, before, contents, of_class in saved:
            for key, held in contents.items():
                if held is not _WAS_EMPTY:
                    _restore(held)
                elif before[key]:
                    before[key].clear()
            for held in of_class.values():
                _restore(held)
            _put_back(child.__dict__, before)


class RehearsedState:
    """Keeps the state of a module from what a rehearsal changes, in which no unit runs.

    Units and what is in them are only guarded against what code outside of them does to modules: attributes that it
    sets and forward hooks that it registers. So all of this is quick.
    """

    def __init__(self, module: nn.Module, units: Mapping[str, nn.Module]) -> None:
        inside = {child for unit in units.values() for child in unit.modules()}
        self._inside = [child.__dict__ for child in inside]
        self._hooks = [held for child in inside for held in (forward_pre_hooks_of(child), forward_hooks_of(child))]
        self._outside = [(name, child) for name, child in module.named_modules() if child not in inside]

    @contextmanager
    def preserved(self, note: Callable[[list[tuple[str, str, Any]]], None] = lambda _: None) -> Iterator[None]:
        """Within, code outside of units may run; afterwards attributes and buffers are as before.

        ``note`` is told at the end what has changed, as by :func:`preserved_state`.
        """
        before = [(attributes, attributes.copy()) for attributes in self._inside]
        hooks = [(held, tuple(held)) for held in self._hooks]
        try:
            with _preserved(self._outside) as changes:
                yield
                note(changes())
        finally:
            for now, held in before:
                if len(now) != len(held) or any(map(is_not, now.values(), held.values())):
                    _put_back(now, held)
            for registered, keys in hooks:
                for key in set(registered).difference(keys) if len(registered) != len(keys) else ():
                    del registered[key]


def _held_by(key: str, value: Any) -> Sequence[Reached]:
    """What an attribute of a module holds that can change."""
    if value is None or isinstance(value, bool):
        return ()
    if key in _OF_TORCH:
        if not isinstance(value, dict):
            return ()
        return (Reached(key, value),) if value else _WAS_EMPTY
    return () if isinstance(value, (Tensor, nn.Module)) else reached_from(value, key)


def _is_edited(value: Any, held: Sequence[Reached]) -> bool:
    return bool(value) if held is _WAS_EMPTY else any(reached.is_changed for reached in held)


def _restore(held: Sequence[Reached]) -> None:
    for reached in held:
        reached.restore()


def _put_back(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Makes the ``attributes`` of a module what they were ``before``, but for those of torch and Lightning."""
    for key in [key for key in attributes if key not in before and key not in _SKIPPED]:
        del attributes[key]
    attributes.update({key: value for key, value in before.items() if key not in _SKIPPED})


def python_generators() -> tuple[Any, ...]:
    """The state of the generators of Python and NumPy, to compare."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, *rest = numpy.random.get_state()
    return (random.getstate(), keys.tobytes(), *rest)
