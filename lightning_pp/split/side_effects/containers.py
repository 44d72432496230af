"""Lists and dicts that units write into: finds them among arguments, finds new entries, and restores them."""

from __future__ import annotations

from typing import Any

from lightning_pp.split.data.tree import children_of
from lightning_pp.split.side_effects.reach import attributes_of

CONTAINERS = (list, dict)
ABSENT = object()


def containers_in(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[tuple[int | str, ...], Any]:
    """The lists and dicts in the arguments that their owner can still see once a unit has written into them.

    The attributes of an object are a dict too, under the object's path and ``__dict__``.
    """
    found: dict[tuple[int | str, ...], Any] = {}
    seen: set[int] = set()

    def visit(node: Any, path: tuple[int | str, ...]) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if type(node) in CONTAINERS:
            found[path] = node
        children: Any = list(enumerate(children_of(node)))
        attributes = None if isinstance(node, (dict, list, tuple)) else attributes_of(node)
        if attributes is not None:
            found[(*path, "__dict__")] = attributes
            children = children or attributes.items()
        for key, child in children:
            visit(child, (*path, key))

    args, kwargs = arguments
    for number, child in enumerate((*args, *kwargs.values())):
        visit(child, (number,))
    return found


def new_entries(container: Any, before: Any) -> Any:
    """New entries of ``container``, and replaced ones of a dict; none if an entry is gone."""
    if isinstance(container, dict):
        if any(key not in container for key in before):
            return {}
        return {key: item for key, item in container.items() if key not in before or before[key] is not item}
    kept = container[: len(before)]
    if len(kept) < len(before) or any(mine is not theirs for mine, theirs in zip(kept, before, strict=True)):
        return []
    return container[len(before) :]


def last_entries(container: Any, like: Any) -> Any:
    """The entries of ``container`` that correspond to those of ``like``, which were its newest."""
    if isinstance(like, dict):
        return {key: container.get(key) for key in like}
    return container[len(container) - len(like) :]


def add_entries(container: Any, entries: Any) -> None:
    """Adds ``entries``; in a dict they replace those of the same keys."""
    if isinstance(container, dict):
        container.update(entries)
    else:
        container.extend(entries)


def put_back(entries: dict[str, Any], key: str, value: Any) -> None:
    """Restores the entry ``key``; :data:`ABSENT`: it was not there."""
    if value is ABSENT:
        entries.pop(key, None)
    else:
        entries[key] = value
