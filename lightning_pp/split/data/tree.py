"""Walks over the nested containers of batches and module outputs.

Containers are what :mod:`torch.utils._pytree` knows (tuples, lists, dicts, named tuples, Hugging Face's
``ModelOutput``) and besides any mapping (Hugging Face's ``BatchEncoding``), any dataclass instance and packed
sequences. Everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset

from lightning_pp.split._torch_private import pytree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns ``tree`` with every leaf replaced by ``function(leaf)``; containers are rebuilt, never edited.

    Leaves are visited in a fixed order that :func:`leaves_of` shares.
    """
    if isinstance(tree, Tensor):
        return function(tree)

    def visit(leaf: Any) -> Any:
        rebuilt = _map_other_children(lambda child: map_leaves(function, child), leaf)
        return function(leaf) if rebuilt is _NO_CONTAINER else rebuilt

    return pytree.tree_map(visit, tree, is_leaf=lambda child: isinstance(child, PackedSequence))


def map_children(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns ``tree`` with each direct child replaced by ``function(child)``; a leaf as it is."""
    rebuilt = _map_other_children(function, tree)
    if rebuilt is not _NO_CONTAINER:
        return rebuilt
    if isinstance(tree, Tensor) or pytree.tree_is_leaf(tree):
        return tree
    own = id(tree)  # torch keeps is_leaf in a reference cycle: a batch in it would live until the next collection
    return pytree.tree_map(function, tree, is_leaf=lambda node: id(node) != own)


def children_of(tree: Any) -> list[Any]:
    """The direct children of ``tree``; none for a leaf."""
    found: list[Any] = []
    map_children(partial(_noted, found), tree)
    return found


def _noted(found: list[Any], entry: Any) -> Any:
    """``entry``, which a copy of its container may have: some dataclasses refuse others."""
    found.append(entry)
    return entry


_NO_CONTAINER = object()


def _map_other_children(function: Callable[[Any], Any], tree: Any) -> Any:
    """:func:`map_children` for the containers that torch does not know."""
    if isinstance(tree, Tensor):
        return _NO_CONTAINER
    if isinstance(tree, PackedSequence):  # its constructor insists on tensors
        return PackedSequence._make(map(function, tree))
    if isinstance(tree, UserDict):
        clone = copy.copy(tree)
        clone.data = {key: function(value) for key, value in tree.data.items()}
        return clone
    if not pytree.tree_is_leaf(tree):
        return _NO_CONTAINER
    if isinstance(tree, Mapping):
        return type(tree)({key: function(value) for key, value in tree.items()})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        instance: Any = object.__new__(type(tree))
        getattr(instance, "__dict__", {}).update(getattr(tree, "__dict__", {}))  # none with slots
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                # a frozen dataclass refuses setattr
                object.__setattr__(instance, field.name, function(getattr(tree, field.name)))
        return instance
    return _NO_CONTAINER


def leaves_of(tree: Any) -> list[Any]:
    """All leaves of ``tree``, in the order of :func:`map_leaves`."""
    found: list[Any] = []
    map_leaves(partial(_noted, found), tree)
    return found


def entries_of(tree: Any, place: str, _around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf of ``tree`` with its place in Python's notation (``batch['labels']``, ``batch[1].mask``).

    Goes into the attributes of objects too, which :func:`map_leaves` takes for leaves; an object that holds itself is
    met once. ``place`` is that of ``tree`` itself.
    """
    if id(tree) in _around:
        return
    children = named_children(tree)
    if children is None:
        yield place, tree
    for name, child in children or ():
        yield from entries_of(child, place + name, (*_around, id(tree)))


def path_of(place: str) -> str:
    """``inputs.x[0]`` for the place ``batch['inputs']['x'][0]``, as options name parts of a batch."""
    return re.sub(r"\['([^']*)'\]", r".\1", place.removeprefix("batch")).lstrip(".") or place


def named_children(tree: Any) -> list[tuple[str, Any]] | None:
    """The direct children of ``tree`` by key; None for a leaf. Objects of pandas count as empty."""
    if isinstance(tree, (Tensor, str, bytes, int, float, complex, type(None), type)):
        return None
    if isinstance(tree, PackedSequence) or hasattr(tree, "_fields"):
        return [(f".{name}", getattr(tree, name)) for name in tree._fields]
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(tree)]
    if not pytree.tree_is_leaf(tree):
        return [(f"[{index}]", value) for index, value in enumerate(children_of(tree))]
    if is_object(tree):
        # pandas keeps answers in its objects, as an Index does after get_loc, and no tensors
        attributes = {} if type(tree).__module__.partition(".")[0] == "pandas" else attributes_of(tree)
        return [(f".{name}", value) for name, value in attributes.items()]
    return None


def own_containers(tree: Any) -> Any:
    """``tree`` in containers of its own, for one run of a step that may write into its batch.

    Lists, dicts, dataclasses and objects with attributes are new and may be given other entries; an object whose class
    says how it is copied (``__copy__``) is copied so, and one that cannot be copied stays itself. Tensors are other
    objects over the same memory, so that what turns them in place (``x.unsqueeze_(0)``) stays with the run.
    """
    return _own(tree, lambda leaf: leaf.detach() if type(leaf) is Tensor and not leaf.requires_grad else leaf, {})


def own_copy(tree: Any) -> Any:
    """As :func:`own_containers`, with memory of its own for every tensor and array."""

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else copy.copy(leaf) if isinstance(leaf, np.ndarray) else leaf

    return _own(tree, copied, {})


def _own(tree: Any, on_leaf: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    """What occurs twice in ``tree`` is one thing in what is returned, too."""
    if id(tree) in known:
        return known[id(tree)]
    of_child: Callable[[Any], Any] = partial(_own, on_leaf=on_leaf, known=known)
    own: Any
    if isinstance(tree, Tensor):
        own = on_leaf(tree)
    elif isinstance(tree, MutableMapping) and not isinstance(tree, UserDict) and pytree.tree_is_leaf(tree):
        own = known[id(tree)] = copy.copy(tree)
        for key, value in tree.items():
            child = of_child(value)
            if child is not value:
                own[key] = child
    elif pytree.tree_is_leaf(tree) and _map_other_children(lambda child: child, tree) is _NO_CONTAINER:
        own = _own_object(tree, of_child, known) if is_object(tree) else on_leaf(tree)
    else:
        own = map_children(of_child, tree)
    known[id(tree)] = own
    return own


def _own_object(instance: Any, of_child: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    try:
        own = copy.copy(instance)
    except Exception:  # whatever a class raises that cannot be copied
        return instance
    known[id(instance)] = own
    if not hasattr(type(instance), "__copy__"):
        for name, value in attributes_of(own).items():
            child = of_child(value)
            if child is not value:
                object.__setattr__(own, name, child)
    return own


def places_written(before: Any, after: Any) -> list[str]:
    """Entries of ``after``, which :func:`own_containers` made of ``before``, that are others, new or gone since."""
    then, now = dict(entries_of(before, "batch")), dict(entries_of(after, "batch"))
    return [
        place
        for place in dict.fromkeys((*then, *now))
        if place not in then or place not in now or not _is_same(then[place], now[place])
    ]


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not Tensor or type(after) is not Tensor or before.layout is not after.layout:
        return type(before) is type(after) and isinstance(before, (str, bytes, int, float)) and before == after
    if before.layout is not torch.strided or before.is_nested:
        return True  # an alias of another layout cannot be told from what is written there
    return bool(before.data_ptr() == after.data_ptr() and before.shape == after.shape)


def is_object(tree: Any) -> bool:
    """Whether ``tree`` is an object of a class that Python code defines, with attributes to hold data in.

    Functions, modules of networks, datasets, paths and whatever C code defines are none.
    """
    kind = type(tree)
    return (
        bool(kind.__flags__ & _HEAP_TYPE)
        and not isinstance(tree, (Tensor, nn.Module, Dataset, PurePath, type, enum.Enum))
        and not callable(tree)
        and (hasattr(tree, "__dict__") or bool(_slots_of(kind)))
    )


def attributes_of(instance: Any) -> dict[str, Any]:
    """The attributes that an object holds itself, in ``__dict__`` and in slots."""
    held = {name: getattr(instance, name) for name in _slots_of(type(instance)) if hasattr(instance, name)}
    return {**held, **getattr(instance, "__dict__", {})}


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by a class statement


def _slots_of(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of ``tree``."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def replace_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """``tree`` with its leaves replaced, in order, by ``leaves``."""
    replacements = iter(leaves)
    return map_leaves(lambda _: next(replacements), tree)
