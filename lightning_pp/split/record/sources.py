"""The sources of a tensor's value, as a mark on the tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lightning_pp.split._torch_private import memory_number
from lightning_pp.split.record.step_record import Value

_SOURCES = "_pp_sources"
_MADE_AFTER = "_pp_made_after"


@dataclass(frozen=True)
class Parameter:
    """Source of a value: the parameter of that name."""

    name: str


@dataclass(frozen=True)
class Inside:
    """Source of a value: made within that unit call."""

    call: int


Source = Value | Parameter | Inside
NOTHING: frozenset[Source] = frozenset()


def sources_of(tensor: Tensor) -> frozenset[Source]:
    """Where the value of ``tensor`` comes from; empty if it depends on the batch alone."""
    return getattr(tensor, _SOURCES, NOTHING)


def set_sources(tensor: Tensor, sources: Iterable[Source]) -> None:
    """Marks where the value of ``tensor`` comes from."""
    setattr(tensor, _SOURCES, frozenset(sources))


def made_after(tensor: Tensor) -> int:
    """The number of unit calls before the operation that made ``tensor``; 0 if it is not known."""
    return int(getattr(tensor, _MADE_AFTER, 0))


def set_made_after(tensor: Tensor, num_calls: int) -> None:
    """Marks when ``tensor`` was made."""
    setattr(tensor, _MADE_AFTER, num_calls)


def storage_of(tensor: Tensor) -> int | None:
    """A number that tensors over the same memory share."""
    try:
        return memory_number(tensor)
    except (NotImplementedError, RuntimeError):
        return None  # sparse and other layouts have no storage
