"""Reads the first batch of a loader without a trace in the training data.

The model is cut by looking at one batch, before Lightning asks for any. One device reads nothing then. So the pass that
the look begins is kept, with the batch that was read, and handed to whoever iterates the loader first: the samplers,
datasets and workers that have moved are those of that pass. Generators are put back until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from lightning_pp.errors import ConfigurationError
from lightning_pp.strategy.step.loader_state import epochs_of, host_draws, own_draws, set_host_draws, set_own_draws

_Iterate: TypeAlias = Callable[[], Iterator[Any]]
# begins a pass over a loader, given what would begin it otherwise
Begin: TypeAlias = Callable[[_Iterate], Iterator[Any]]

_BEGINS = "_lightning_pp_begins"
_WATCHED_CLASSES: dict[type, type] = {}
_NOTHING = object()


def watch(loader: DataLoader[Any], name: str, begin: Begin, *, innermost: bool = False) -> None:
    """Has ``begin`` begin each pass over ``loader``, around those of other names or, if ``innermost``, within them."""
    others = {other: each for other, each in vars(loader).get(_BEGINS, {}).items() if other != name}
    vars(loader)[_BEGINS] = {name: begin, **others} if innermost else {**others, name: begin}
    if not isinstance(loader, _Watched):
        loader.__class__ = _watched_class(type(loader))


class _Watched(DataLoader[Any]):
    """The class of a loader whose passes other code begins."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # a generator is an iterator, too
        iterate: _Iterate = super().__iter__
        for begin in vars(self).get(_BEGINS, {}).values():  # none where Lightning has made the loader anew
            iterate = partial(begin, iterate)
        return iterate()


def _watched_class(kind: type) -> type:
    if kind not in _WATCHED_CLASSES:
        namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _WATCHED_CLASSES[kind] = type(kind.__name__, (_Watched, kind), namespace)
    return _WATCHED_CLASSES[kind]


class FirstLook:
    """A pass over a loader that is begun, and from which :meth:`read` takes the first batch.

    Args:
        loader: Anything that can be iterated.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._can_be_repeated = not hasattr(loader, "__next__")
        self._before = self._states()
        self._batches: Iterator[Any] | None = iter(loader)
        self._begun = self._states()
        self._asked = self._after = self._begun

    def read(self) -> Any:
        """The first batch. To be called once; loaders that are read together are all begun before.

        Raises:
            ConfigurationError: The loader is empty.
        """
        assert self._batches is not None
        self._asked = self._states()
        self._first = next(self._batches, _NOTHING)
        self._after = self._states()
        set_own_draws(self._loader, self._before[1])
        if self._first is _NOTHING:
            raise ConfigurationError(
                f"The dataloader ({type(self._loader).__name__}) is empty. The model is cut by looking at one batch. "
                "Give at least one."
            )
        return self._first

    def begin(self, iterate: _Iterate) -> Iterator[Any]:
        """Begins a pass: the one that was kept, if it is the first and the generators stand where the look began."""
        if self._batches is None:
            return iterate()
        now = self._states()
        if self._can_be_repeated and not (_are_equal(now, self._before) or _are_equal(now, self._begun)):
            self._batches = None
            return iterate()
        self._put(self._begun)
        return self._kept_batches(iterate)

    def _kept_batches(self, iterate: _Iterate) -> Iterator[Any]:
        """The kept batches, from when the first is asked for: where hooks have drawn since, samplers draw anew."""
        batches, self._batches = self._batches, None
        now = self._states()
        if batches is None:  # somebody else was first
            yield from iterate()
        elif not self._can_be_repeated or _are_equal(now, self._asked):
            self._put(self._after)
            first, self._first = self._first, None
            yield first
            del first  # it would be held for the whole epoch
            yield from batches
        else:
            self._put(self._before)
            batches = iterate()
            self._put(now)
            yield from batches

    def _states(self) -> list[Any]:
        return [host_draws(), own_draws(self._loader), epochs_of(self._loader)]

    def _put(self, states: list[Any]) -> None:
        set_host_draws(states[0])
        set_own_draws(self._loader, states[1])


class AroundLoader:
    """Has the attributes of a loader, around which it is."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        """What it is asked besides batches is asked of the loader."""
        if name == "loader":  # while it is made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Batches of the loader."""
        return len(self.loader)


class LookedAt(AroundLoader):
    """A loader of a class of the user's with its first pass kept."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.look = FirstLook(loader)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the loader."""
        return self.look.begin(partial(iter, self.loader))


def look_at(loader: Any) -> tuple[Any, FirstLook]:
    """Begins a look at ``loader``: the loader to train with, and the look."""
    if isinstance(loader, LookedAt):
        return loader, loader.look
    if not isinstance(loader, DataLoader):
        looked_at = LookedAt(loader)
        return looked_at, looked_at.look
    look = FirstLook(loader)
    watch(loader, "look", look.begin, innermost=True)
    return loader, look


def _are_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)) and set(map(type, left)) != {int}:  # Python's generator has 625 numbers
        return len(left) == len(right) and all(map(_are_equal, left, right))
    return bool(left == right)
