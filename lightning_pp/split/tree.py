"""Walks over the nested containers that batches and module outputs are made of.

Containers are what :mod:`torch.utils._pytree` knows (tuples, lists, dicts, named tuples, Hugging Face's
``ModelOutput``) and besides any mapping (Hugging Face's ``BatchEncoding``), any dataclass instance and packed
sequences. Everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns ``tree`` with every leaf replaced by ``function(leaf)``; containers are rebuilt, never edited.

    Leaves are visited in a fixed order that :func:`leaves_of` shares.
    """
    if isinstance(tree, Tensor):
        return function(tree)

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, PackedSequence):  # its constructor insists on tensors
            return PackedSequence._make(map_leaves(function, part) for part in leaf)
        if isinstance(leaf, UserDict):
            clone = copy.copy(leaf)
            clone.data = {key: map_leaves(function, value) for key, value in leaf.data.items()}
            return clone
        if isinstance(leaf, Mapping):
            return type(leaf)({key: map_leaves(function, value) for key, value in leaf.items()})  # type: ignore[call-arg]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            instance: Any = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                if hasattr(leaf, field.name):
                    # a frozen dataclass refuses setattr
                    object.__setattr__(instance, field.name, map_leaves(function, getattr(leaf, field.name)))
            return instance
        return function(leaf)

    return _pytree.tree_map(visit, tree, is_leaf=_is_packed)


def _is_packed(tree: Any) -> bool:
    return isinstance(tree, PackedSequence)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves of ``tree`` in the order in which :func:`map_leaves` visits them."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of ``tree``."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def replace_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """``tree`` with its leaves replaced, in order, by ``leaves``."""
    replacements = iter(leaves)
    return map_leaves(lambda _: next(replacements), tree)
