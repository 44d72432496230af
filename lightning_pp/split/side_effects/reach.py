"""Objects that code can reach from an attribute and change: lists, dicts, sets, deques, attributes of objects."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_not
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

MUTABLE = (list, dict, set, deque)
# Objects of these packages look after themselves, and may be at work on other threads.
LIBRARIES = frozenset(
    {
        *(set(sys.stdlib_module_names) - {"__main__"}),
        *("torch", "lightning", "lightning_pp", "lightning_fabric", "pytorch_lightning", "torchmetrics", "numpy"),
        *("wandb", "tensorboard", "omegaconf", "hydra"),
    }
)
PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), Tensor, nn.Parameter})
# Not the state of anything that one call hands to the next.
_OPAQUE = (Tensor, nn.Module, ModuleType, type)


class Reached:
    """A container or the attributes of an object, with their content when this was made.

    Attributes:
        path: How it is reached, as a user would write it: ``outs[0]``, ``meter.sums``.
        container: A list, dict, set or deque; for an object its ``__dict__``.
        content: A shallow copy.
    """

    def __init__(self, path: str, container: Any) -> None:
        self.path = path
        self.container = container
        self.content: Any = container.copy() if type(container) in MUTABLE else _copied(container)

    @property
    def is_changed(self) -> bool:
        """Whether entries were added, removed or replaced; the content of entries is not compared."""
        now, before = self.container, self.content
        if len(now) != len(before) or not before:
            return len(now) != len(before)
        if isinstance(now, dict):
            return now.keys() != before.keys() or any(map(is_not, map(before.__getitem__, now), now.values()))
        if isinstance(now, set):
            return bool(now != before)
        return any(map(is_not, now, before))

    def restore(self) -> None:
        """Puts the content back, into the same object."""
        if self.is_changed:
            self.set(self.content)

    def set(self, content: Any) -> None:
        """Replaces the content."""
        container = self.container
        if isinstance(container, list):
            container[:] = content
        else:
            container.clear()
            container.extend(content) if isinstance(container, deque) else container.update(content)

    def num_new(self) -> int | None:
        """How many entries were appended to a list or deque; None if something else has happened.

        A deque that is full has lost as many at its other end.
        """
        now, before = self.container, self.content
        dropped = 0
        if isinstance(now, deque) and now.maxlen is not None:
            dropped = _num_dropped(list(now), list(before), now.maxlen)
        kept = list(before)[dropped:]
        if len(now) < len(kept) or any(mine is not theirs for mine, theirs in zip(now, kept, strict=False)):
            return None
        return len(now) - len(kept)


def attributes_of(node: Any) -> dict[str, Any] | None:
    """The attributes of an object that may be the state of something; None for tensors, modules, functions."""
    if isinstance(node, _OPAQUE) or callable(node):
        return None
    return getattr(node, "__dict__", None)


def reached_from(value: Any, name: str) -> list[Reached]:
    """All that ``value`` holds, to any depth, and itself first if it is a container or an object; each once.

    Not looked into: tensors, modules, functions, objects of libraries and those without a ``__dict__``.
    """
    found: list[Reached] = []
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(name, value)]
    while waiting:
        path, node = waiting.pop()
        if type(node) in PLAIN or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, tuple):
            waiting += _children(path, node)
            continue
        if isinstance(node, MUTABLE):
            found.append(Reached(path, node))
            waiting += _children(path, node)
        elif (attributes := _user_attributes(node)) is not None:
            found.append(Reached(path, attributes))
            waiting += ((f"{path}.{key}", child) for key, child in attributes.items())
    return found


@contextmanager
def restored(reached: Sequence[Reached]) -> Iterator[None]:
    """In the block, ``reached`` may change; afterwards each holds what it held when it was made."""
    try:
        yield
    finally:
        for each in reached:
            each.restore()


class ClassAttributes:
    """The attributes of the users' classes that ``kinds`` are or inherit from, as they are now."""

    def __init__(self, kinds: Iterable[type]) -> None:
        users = {each for kind in kinds for each in kind.__mro__ if not _is_library_class(each)}
        self._before = [(each, dict(vars(each))) for each in users]

    def restore(self) -> None:
        """Puts back those that were set, and deletes those that were added."""
        for kind, before in self._before:
            now = dict(vars(kind))
            for name in [name for name in now if name not in before and not name.startswith("__")]:
                delattr(kind, name)
            for name, value in before.items():
                if now.get(name) is not value and not name.startswith("__"):
                    setattr(kind, name, value)


def class_containers(kind: type) -> dict[str, Any]:
    """The containers that a user's class and those that it inherits from hold, by name."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        if _is_library_class(each):
            continue
        for name, value in vars(each).items():
            if isinstance(value, MUTABLE) and not name.startswith("__"):
                found[name] = value
            else:
                found.pop(name, None)
    return found


def _children(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a container that can hold something themselves."""
    if isinstance(node, set):
        return
    entries = node.values() if isinstance(node, dict) else node
    if PLAIN.issuperset(map(type, entries)):
        return
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in items:
        if type(child) not in PLAIN:
            yield f"{path}[{key!r}]", child


def _user_attributes(node: Any) -> dict[str, Any] | None:
    """The attributes of an object of a user's class."""
    kind = type(node)
    if kind is not SimpleNamespace and _is_library_class(kind):
        return None
    return attributes_of(node)


def _is_library_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


def _copied(container: Any) -> Any:
    """The content of a container of some other class, whose own copying may do more."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    return set(container) if isinstance(container, set) else list(container)


def _num_dropped(now: list[Any], before: list[Any], maxlen: int) -> int:
    """How many of ``before`` a deque of ``maxlen`` has lost at its start."""
    for dropped in range(len(before) + 1):
        kept = before[dropped:]
        if len(now) >= len(kept) and all(mine is theirs for mine, theirs in zip(now, kept, strict=False)):
            return dropped if dropped == 0 or len(now) == maxlen else 0
    return 0
