"""Walks over nested containers."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutputWithPast

from lightning_pp.split.data.tree import (
    children_of,
    entries_of,
    leaves_of,
    map_children,
    map_leaves,
    own_containers,
    own_copy,
    places_written,
    replace_leaves,
    tensors_of,
)

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Open:
    value: Any
    rest: Any = None


@dataclass(frozen=True)
class Frozen:
    value: Any
    rest: Any = None


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("rest", "value")
    value: Any
    rest: Any


class OnlyTensors:
    """A field that checks what it is set to."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else vars(instance)[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"got {type(value)}")
        vars(instance)[self.name] = value


@dataclass
class Validated:
    """As the batches of some libraries."""

    value: Tensor = OnlyTensors()  # type: ignore[assignment]


def one() -> Tensor:
    return torch.ones(2)


CONTAINERS = {
    "list": [one(), 2],
    "tuple": (one(), 2),
    "nested": [(one(), {"a": 2}), []],
    "dict": {"b": one(), "a": 2},
    "ordered": OrderedDict(b=one(), a=2),
    "namedtuple": Pair(one(), 2),
    "dataclass": Open(one(), 2),
    "frozen": Frozen(one(), Open(2)),
    "slotted": Slotted(one(), 2),
    "proxy": MappingProxyType({"b": one(), "a": 2}),
    "encoding": BatchEncoding({"b": one(), "a": 2}),
    "model_output": BaseModelOutputWithPast(last_hidden_state=one(), past_key_values=2),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_leaves_are_replaced_and_containers_rebuilt(name: str) -> None:
    tree = CONTAINERS[name]
    before = leaves_of(tree)
    doubled = map_leaves(lambda leaf: leaf if leaf is None else leaf * 2, tree)
    assert type(doubled) is type(tree)
    assert doubled is not tree
    leaves = leaves_of(doubled)
    assert len(leaves) == len(before)
    for leaf, old in zip(leaves, before, strict=True):
        assert leaf is old is None or torch.equal(torch.as_tensor(leaf), torch.as_tensor(old * 2))
    assert all(mine is theirs for mine, theirs in zip(leaves_of(tree), before, strict=True))  # not edited
    again = leaves_of(replace_leaves(tree, range(len(before))))
    assert again == list(range(len(before)))
    assert [id(tensor) for tensor in tensors_of(tree)] == [id(leaf) for leaf in before if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", CONTAINERS)
def test_children_are_one_level(name: str) -> None:
    tree = CONTAINERS[name]
    children = children_of(tree)
    assert len(children) == 2
    mapped = map_children(lambda child: [child], tree)
    assert type(mapped) is type(tree)
    assert [child[0] is old for child, old in zip(children_of(mapped), children, strict=True)] == [True, True]


@pytest.mark.parametrize("leaf", [one(), 3, "text", None, object(), Open, torch.float32])
def test_leaves(leaf: Any) -> None:
    assert len(leaves_of(leaf)) == 1
    assert leaves_of(leaf)[0] is leaf
    assert children_of(leaf) == []
    assert map_children(lambda child: 1 / 0, leaf) is leaf


def test_packed_sequences_are_containers() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert len(tensors_of(packed)) == 2
    rebuilt = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, packed)
    assert isinstance(rebuilt, nn.utils.rnn.PackedSequence)
    assert torch.equal(rebuilt.data, packed.data) and rebuilt.sorted_indices is None
    assert leaves_of(replace_leaves({"packed": packed}, "abcd")) == ["a", "b", "c", "d"]


def test_a_field_that_is_not_set_is_left_out() -> None:
    partial = Open.__new__(Open)
    partial.value = one()
    assert len(leaves_of(partial)) == 2  # the default of the other is the class's
    assert torch.equal(map_leaves(lambda leaf: leaf, partial).value, one())


class OfItsOwnKind(dict[str, Any]):
    def __init__(self, content: dict[str, Any], *, name: str) -> None:
        super().__init__(content)
        self.name = name


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x


class Linked:
    def __init__(self, x: Any) -> None:
        self.x, self.parts, self.owner = x, [x], self


class Uncopyable:
    def __init__(self) -> None:
        self.x = torch.ones(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not this one")


def test_runs_get_containers_of_their_own() -> None:
    x = torch.arange(4.0)
    uncopyable = Uncopyable()
    tree = {
        "list": [x, [x]],
        "encoding": BatchEncoding({"ids": x}),
        "open": Open(x, {"deep": [1]}),
        "kind": OfItsOwnKind({"a": [x]}, name="n"),
        "read only": MappingProxyType({"b": [x]}),
        "slotted": Slotted([x]),
        "linked": Linked(x),
        "uncopyable": uncopyable,
    }
    places = [place for place, _ in entries_of(tree, "batch")]
    own = own_containers(tree)
    assert [place for place, _ in entries_of(own, "batch")] == places and places_written(tree, own) == []
    assert own["list"][0] is own["list"][1][0] is own["open"].value  # what is one thing stays one
    assert own["list"][0] is not x and own["list"][0].data_ptr() == x.data_ptr()
    assert own["linked"].owner is own["linked"] and own["kind"].name == "n" and own["uncopyable"] is uncopyable
    own["list"][1].append(1)
    own["list"][0].unsqueeze_(0)
    own["encoding"]["ids"] = x + 1
    own["open"].rest["deep"].clear()
    own["kind"]["a"].append(2)
    own["read only"]["b"].append(2)
    own["slotted"].x.append(3)
    own["linked"].parts.append(4)
    own["linked"].new = 5
    del own["open"].value
    assert [place for place, _ in entries_of(tree, "batch")] == places and x.shape == (4,)
    assert len(places_written(tree, own)) >= 8
    copied = own_copy(tree)
    copied["slotted"].x[0].zero_()
    assert torch.equal(x, torch.arange(4.0)) and not copied["list"][0].any()


def test_what_refuses_other_values_is_read() -> None:
    value = one()
    assert children_of(Validated(value)) == leaves_of([Validated(value)]) == [value]
    assert tensors_of(Validated(value))[0] is value
