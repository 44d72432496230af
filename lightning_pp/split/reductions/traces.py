"""How what a step counts is made of its batch, so that it can be counted without running the step.

A count such as the number of targets that are not ignored needs few functions of the batch: a slice, a view, a padding.
Within a rehearsal they are followed from the batch's tensors to the call that counts; for another batch, for which the
step's course is the same, they alone are run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pp.split._torch_private import version_of
from lightning_pp.split.data.tree import leaves_of
from lightning_pp.split.record.reduction import Kind, Place
from lightning_pp.split.reductions.facts import Facts
from lightning_pp.split.reductions.functions import MAKES_THE_SAME, WRITES_INTO_FIRST, LossCall, count_of_targets
from lightning_pp.split.reductions.scaling import Count
from lightning_pp.split.unit_calls.interception import OutsideUnits, gives_value

_MADE = "_pp_made_of_batch"
_CONSTANTS = (type(None), bool, int, float, str, EllipsisType, torch.dtype, torch.device, torch.memory_format)


class Made(NamedTuple):
    """A value that functions of torch make of a batch.

    Attributes:
        function: What returns it; None where it is a leaf of the batch.
        args: What that is given, with a :class:`Made` for each tensor; of a leaf, its number.
        kwargs: The same by keyword.
        entry: Which of several results it is.
    """

    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    entry: int | None = None


Trace = Mapping[Place, Made]
"""How the count at each place is computed."""


class CountTrace(OutsideUnits):
    """Within, a rehearsal's functions are followed from the batch on; goes inside of what counts.

    A value is known if it is a tensor of the batch, or what a function that returns the same for the same arguments has
    made of known values and constants, or has written them into. What shares memory with a tensor that is written into
    is not known any more.

    Args:
        batch: What the rehearsal's step is given; tensors that track no versions are not followed.
        facts: What is known of the step's calls.
    """

    def __init__(self, batch: Any, facts: Facts) -> None:
        super().__init__()
        leaves = leaves_of(batch)
        times = Counter(map(id, leaves))  # another batch may have two tensors where this one has the same one twice
        self._leaves = {
            id(leaf): (leaf, version_of(leaf), number)
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and not leaf.is_inference() and times[id(leaf)] == 1
        }
        self._facts = facts
        self._running: tuple[Any, Any, Any] | None = None
        self._run = object()  # what other runs made means nothing
        self.found: dict[Place, Made] = {}

    def note_count(self, place: Place) -> None:
        """The function that runs now counts at ``place``."""
        fact = self._facts.find(place)
        if self._running is None or fact is None:
            return
        function, args, kwargs = self._running
        made: Made | None = None
        if fact.call.kind is Kind.LOSS:
            counted = LossCall(function, args, kwargs).counted_targets()
            made = None if counted is None else self._made_by(count_of_targets, counted, {})
        elif fact.call.kind is Kind.SUM and fact.over_rows:
            made = self._made_by(function, args, kwargs)
        if made is not None:
            self.found[place] = made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        made: Made | None = None  # of the arguments as they are before
        if name in MAKES_THE_SAME:
            made = self._made_by(func, args, kwargs)
        elif name in WRITES_INTO_FIRST:
            made = self._made_by(partial(_written, func), args, kwargs)
        self._running = func, args, kwargs
        result = func(*args, **kwargs)
        self._running = None
        if made is not None:
            self._note(made, args[0] if name in WRITES_INTO_FIRST else result)
        return result

    def _note(self, made: Made, result: Any) -> None:
        several = isinstance(result, (list, tuple))
        for entry, each in enumerate(result) if several else [(None, result)]:
            if gives_value(each) and id(each) not in self._leaves:
                setattr(each, _MADE, (self._run, version_of(each), made._replace(entry=entry)))

    def _made_by(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Made | None:
        if "out" in kwargs:
            return None
        try:
            return Made(
                function, tuple(map(self._known, args)), {key: self._known(each) for key, each in kwargs.items()}
            )
        except _NotKnownError:
            return None

    def _known(self, value: Any) -> Any:
        """``value`` with a :class:`Made` for each tensor; raises :class:`_NotKnownError` if one is not known."""
        if isinstance(value, Tensor):
            leaf = self._leaves.get(id(value))
            if leaf is not None and leaf[1] == version_of(value):
                return Made(None, (leaf[2],), {})
            run, version, made = getattr(value, _MADE, (None, None, None))
            if run is self._run and version == version_of(value):
                return made
        elif type(value) in _CONSTANTS or (
            type(value) is slice
            and all(type(each) in (int, type(None)) for each in (value.start, value.stop, value.step))
        ):
            return value
        elif type(value) in (list, tuple, torch.Size):
            return (list if type(value) is list else tuple)(map(self._known, value))
        raise _NotKnownError


class _NotKnownError(Exception):
    """A value is not made of the batch by functions that are known."""


def counts_of(trace: Trace, batch: Any) -> dict[Place, Count]:
    """What ``batch`` counts, without running its step.

    Its signature is that of the batch of ``trace``, and the step takes the same course for it.
    """
    leaves = leaves_of(batch)
    values: dict[int, Any] = {}
    with torch.no_grad():
        return {place: (_value_of(made, leaves, values),) for place, made in trace.items()}


def _written(function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A copy of ``tensor`` into which ``function`` has written."""
    copy = tensor.clone()
    function(copy, *args, **kwargs)
    return copy


def _value_of(made: Made, leaves: Sequence[Any], values: dict[int, Any]) -> Any:
    if made.function is None:
        return leaves[made.args[0]]
    found = values.get(id(made))
    if found is None:
        args = _filled(made.args, leaves, values)
        kwargs = {key: _filled(value, leaves, values) for key, value in made.kwargs.items()}
        found = made.function(*args, **kwargs)
        if made.entry is not None:
            found = found[made.entry]
        values[id(made)] = found
    return found


def _filled(value: Any, leaves: Sequence[Any], values: dict[int, Any]) -> Any:
    if type(value) is Made:
        return _value_of(value, leaves, values)
    return type(value)(_filled(each, leaves, values) for each in value) if type(value) in (list, tuple) else value
