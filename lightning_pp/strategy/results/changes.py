"""A change that a step makes at one place of the module: in a microbatch, and in the whole batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_pp.split.side_effects.reach import Reached
from lightning_pp.strategy.results.learned import Learned, is_number
from lightning_pp.strategy.results.outputs import all_equal, mean_of, merge_outputs


class Absent(Enum):
    """What stands for a change where there is no new value."""

    DELETED = "deleted"
    UNCHANGED = "unchanged"


class Move(NamedTuple):
    """A number that is another one now, or a tensor or array that was written in place."""

    before: Any
    value: Any
    in_place: bool = False

    @property
    def added(self) -> Any:
        """The difference to the value before; for flags, those that have changed."""
        are_flags = getattr(self.before, "dtype", None) in (torch.bool, np.bool_)
        return self.value ^ self.before if are_flags else self.value - self.before


class Rows(NamedTuple):
    """Entries that were appended to a list, or rows at the end of an array."""

    value: Any


def changes_in(reached: Reached, of_whole_batch: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """The changes of a container's entries by key; under None its new content, or appended entries."""
    now, before = reached.container, reached.content
    if not reached.is_changed:
        return
    num_new = None if isinstance(now, (dict, set)) else reached.num_new()
    if isinstance(now, dict):
        yield from changes_of_items(before, now, of_whole_batch)
    elif num_new is not None:
        yield None, Rows(of_whole_batch(list(now)[len(now) - num_new :]))
    elif isinstance(now, list) and len(now) == len(before):
        yield from changes_of_items(dict(enumerate(before)), dict(enumerate(now)), of_whole_batch)
    else:
        yield None, of_whole_batch(now.copy())


def changes_of_items(
    before: Mapping[Any, Any], now: Mapping[Any, Any], of_whole_batch: Callable[[Any], Any]
) -> Iterator[tuple[Any, Any]]:
    """By key what became of the items of a dict; of a new key, Counter and defaultdict say what was there before."""
    none: Any = 0 if isinstance(now, Counter) else None
    if isinstance(now, defaultdict) and now.default_factory is not None:
        none = now.default_factory()
    for key in dict.fromkeys((*before, *now)):
        if key not in now:
            yield key, Absent.DELETED
        elif before.get(key, Absent.DELETED) is not now[key]:
            yield key, change_of(before.get(key, none), of_whole_batch(now[key]))


def change_of(before: Any, now: Any) -> Any:
    """The change of a place from before to ``now``: a move for a number, rows if it has grown at its end."""
    if is_number(before) and is_number(now):
        before, now = (each.detach() if isinstance(each, Tensor) else each for each in (before, now))
        return Move(before, now)
    if type(before) is type(now) is list or (type(before) is type(now) is np.ndarray and before.dtype == now.dtype):
        kept = now[: len(before)]
        is_kept = all(map(is_, kept, before)) if isinstance(now, list) else all_equal([kept, before])
        if len(before) < len(now) and is_kept:
            return Rows(now[len(before) :])
    return now.copy() if isinstance(now, (list, dict, set)) else now  # the step's own may be put back to what it was


def merged_change(
    changes: Sequence[Any], num_samples: Sequence[int], weights: Sequence[float], learned: Learned, name: str
) -> Any:
    """What the batch makes of a place; microbatches that changed it in another way than the last one do not count."""
    last = next(change for change in reversed(changes) if change is not Absent.UNCHANGED)
    if isinstance(last, Move):
        moves = [change if isinstance(change, Move) else Move(last.before, last.before) for change in changes]
        moved = _merged_moves(moves, weights, learned, name)
        return Move(None, moved, in_place=True) if last.in_place else moved
    kind = Rows if isinstance(last, Rows) else object
    parts = [part for part in zip(changes, num_samples, weights, strict=True) if part[0] is not Absent.UNCHANGED]
    alike, samples, shares = zip(*(part for part in parts if isinstance(part[0], kind)), strict=True)
    values = [change.value for change in alike] if kind is Rows else alike
    if all(isinstance(value, list) for value in values):
        merged = _merged_entries(values, samples, shares, learned, name)
    elif kind is Rows:
        merged = np.concatenate(values)
    elif all_equal(values):  # a value that the samples do not change, a cache, has no row per sample
        merged = values[0]
    else:
        merged = merge_outputs(values, samples, shares)
    return Rows(merged) if kind is Rows else merged


def _merged_moves(moves: Sequence[Move], weights: Sequence[float], learned: Learned, name: str) -> Any:
    """What a batch made of a number: all moves if they add up, else their mean, or the last one's of whole numbers."""
    before, added = moves[0].before, [move.added for move in moves]
    adds_up = learned.adds_up(name, added, weights)
    if getattr(before, "dtype", None) in (torch.bool, np.bool_):
        return before ^ (sum(added) > 0)
    are_whole = all(map(_is_whole, added))
    if adds_up or (adds_up is None and are_whole and not all_equal(added)):
        return before + sum(added)
    if adds_up is None and are_whole and len(moves) > 1 and type(before) in (int, float):
        learned.note_unknown(name, before, moves[-1].value)
    return moves[-1].value if are_whole else mean_of([move.value for move in moves], weights)


def _is_whole(number: Any) -> bool:
    if isinstance(number, Tensor):  # by its dtype: a look at values waits for the device
        return not (number.is_floating_point() or number.is_complex())
    with np.errstate(invalid="ignore"):  # of infinity, which a best value begins with
        return bool(np.all(np.asarray(number) % 1 == 0))


def _merged_entries(
    parts: Sequence[list[Any]], num_samples: Sequence[int], weights: Sequence[float], learned: Learned, name: str
) -> Any:
    """The entries of a batch in a list: one for each sample, or its own entries, or all of them."""
    if learned.is_by_sample(name, parts, num_samples):
        return merge_outputs(parts, num_samples, weights)
    if len(set(map(len, parts))) > 1:
        return [entry for part in parts for entry in part]
    return [
        merge_outputs(entries, num_samples, weights, learned, f"{name}[{index}]")
        for index, entries in enumerate(zip(*parts, strict=True))
    ]
