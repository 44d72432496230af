"""Logged numbers that are made of others (``loss.exp()``, ``mse.sqrt()``), computed of those of the batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split.data.tree import leaves_of, map_leaves
from lightning_pp.split.record.reduction import Kind
from lightning_pp.split.reductions.functions import kind_of_call
from lightning_pp.split.reductions.scaling import are_values_as_they_are, degree_of
from lightning_pp.split.unit_calls.interception import OutsideUnits, running_unit
from lightning_pp.strategy.results.log_calls import LogCall

_MOST_FUNCTIONS = 100


class _Place(int):
    """Stands for a number that a formula is given."""


class Formula:
    """How one number is made of others.

    Args:
        func: The last function.
        args: What it is given, with formulas and places of numbers instead of tensors.
        kwargs: Its keyword arguments.
    """

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs

    @property
    def fingerprint(self) -> str:
        """A text for its functions and constants, equal in every process."""
        return format(zlib.crc32(self._text().encode()), "08x")

    def of(self, numbers: Sequence[Tensor]) -> Any:
        """Its value."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return numbers[leaf]
            return leaf.of(numbers) if isinstance(leaf, Formula) else leaf

        return self._func(*map_leaves(value, self._args), **map_leaves(value, self._kwargs))

    def _text(self) -> str:
        return f"{getattr(self._func, '__name__', '')}({', '.join(map(_text, leaves_of((self._args, self._kwargs))))})"


def _text(leaf: Any) -> str:
    if isinstance(leaf, torch.device):  # replicas have one each
        return "device"
    return leaf._text() if isinstance(leaf, Formula) else f"{type(leaf).__name__} {leaf!r}"


class ScalarFunctions(OutsideUnits):
    """Within, in the step of one microbatch, functions from numbers to a number are noted.

    A number is a tensor without dimensions. One that grows with the batch, or that a function makes of rows, is what a
    formula begins with: the batch's own is known, since its mean over microbatches, with the counts of the whole batch
    (:mod:`lightning_pp.split.reductions`), is its value.
    """

    def __init__(self) -> None:
        super().__init__()
        # by the identity of results, which are kept, so that it stays theirs
        self._made: dict[int, tuple[Tensor, Any, Any, Any]] = {}
        self._edited: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # what a metric computes is its own
        is_followed = not (running_unit() or are_values_as_they_are())
        if is_followed and isinstance(result, Tensor) and not result.dim():
            given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(each is result for each in given):
                self._edited[id(result)] = result
            elif given and not any(each.dim() for each in given) and not _counts(func, args, kwargs, result):
                self._made[id(result)] = result, func, args, kwargs
        return result

    def formula_of(self, number: Any) -> tuple[Formula, list[Tensor]] | None:
        """How ``number`` was made, and of what.

        None if no function made it of others, if one was written into, or if it takes more than a hundred functions.
        """
        numbers: list[Tensor] = []
        num_functions = 0

        def follow(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            nonlocal num_functions
            if id(leaf) not in self._made and id(leaf) not in self._edited:
                numbers.append(leaf)
                return _Place(len(numbers) - 1)
            num_functions += 1
            if id(leaf) in self._edited or num_functions > _MOST_FUNCTIONS:
                raise _NoFormulaError
            _, func, args, kwargs = self._made[id(leaf)]
            return Formula(func, map_leaves(follow, args), map_leaves(follow, kwargs))

        try:
            formula = follow(number)
        except _NoFormulaError:
            return None
        return (formula, numbers) if isinstance(formula, Formula) else None


def _counts(func: Any, args: Any, kwargs: Any, result: Tensor) -> bool:
    """Whether a number of Python's grows with the batch, as ``len(x)`` does: of a microbatch it is another one."""
    if kind_of_call(func, args, kwargs) not in (Kind.PRODUCT, Kind.QUOTIENT):
        return False
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    return len(tensors) == 1 and abs(degree_of(tensors[0])) != abs(degree_of(result))


class _NoFormulaError(Exception):
    """A number was written into, or is made by too many functions."""


def with_formulas(calls: Sequence[LogCall], formulas: Mapping[str, Formula]) -> list[LogCall]:
    """Merged calls, with the values of formulas that all microbatches of all replicas have in common.

    Args:
        calls: With those of the numbers that logged ones are made of, which are left out.
        formulas: By their fingerprints.
    """
    parts: dict[tuple[Hashable, ...], dict[str, dict[int, LogCall]]] = {}
    for call in calls:
        if call.part is not None:
            fingerprint, place = call.part
            parts.setdefault(call.whole_key, {}).setdefault(fingerprint, {})[place] = call
    return [_computed(call, parts.get(call.key, {}), formulas) for call in calls if call.part is None]


def _computed(call: LogCall, parts: Mapping[str, Mapping[int, LogCall]], formulas: Mapping[str, Formula]) -> LogCall:
    for fingerprint, numbers in parts.items():
        # a number weighs less than the call where some microbatches have another formula
        if all(number.weight == call.weight and number.value is not None for number in numbers.values()):
            value = _value_of(formulas[fingerprint], [numbers[place] for place in sorted(numbers)])
            call = call if value is None else replace(call, value=value)
    return call


def _value_of(formula: Formula, numbers: Sequence[LogCall]) -> float | None:
    """The value of a formula; None if a function does not take the numbers."""
    # the mean of integers is none
    dtypes = [each.dtype if each.dtype.is_floating_point else torch.float64 for each in numbers]
    tensors = [torch.tensor(each.value, dtype=dtype) for each, dtype in zip(numbers, dtypes, strict=True)]
    try:
        with torch.no_grad():
            return float(formula.of(tensors))
    except (RuntimeError, TypeError, ValueError):
        return None
