"""How far the training is, and what a step asks of that: the same questions can be asked again before another step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl

Ask = Callable[[Callable[["Progress"], bool]], None]


class Progress(NamedTuple):
    """How far the training is."""

    batch_idx: int
    global_step: int
    current_epoch: int


class _Watched:
    """A number made of the training's progress; what it is compared with is told.

    Python's own functions see a plain number (``math.cos``, a slice), and so does torch.

    Attributes:
        formula: The number at another progress.
        ask: Is told of each comparison: whether its outcome at another progress is the same.
    """

    formula: Callable[[Progress], Any]
    ask: Ask


class _WatchedInt(_Watched, int):
    __hash__ = int.__hash__


class _WatchedFloat(_Watched, float):
    __hash__ = float.__hash__


_ARITHMETIC = ("add", "sub", "mul", "mod", "floordiv", "truediv", "pow")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _watched(value: Any, formula: Callable[[Progress], Any], ask: Ask) -> Any:
    if type(value) not in (int, float):
        return value
    number: Any = (_WatchedInt if type(value) is int else _WatchedFloat)(value)
    number.formula, number.ask = formula, ask
    return number


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, int) else float(number)


def _at(number: Any, progress: Progress) -> Any:
    return number.formula(progress) if isinstance(number, _Watched) else number


def _arithmetic(function: Callable[[Any, Any], Any], is_reflected: bool) -> Callable[[Any, Any], Any]:
    def calculate(number: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        left, right = (other, number) if is_reflected else (number, other)
        value = function(_plain(left), _plain(right))
        return _watched(value, lambda progress: function(_at(left, progress), _at(right, progress)), number.ask)

    return calculate


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def compare(number: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        answer = function(_plain(number), _plain(other))
        number.ask(lambda progress: function(_at(number, progress), _at(other, progress)) is answer)
        return answer

    return compare


def _is_true(number: Any) -> bool:
    answer = bool(_plain(number))
    number.ask(lambda progress: bool(number.formula(progress)) is answer)
    return answer


_OPERATORS = {
    "__bool__": _is_true,
    **{f"__{name}__": _arithmetic(getattr(operator, name), is_reflected=False) for name in _ARITHMETIC},
    **{f"__r{name}__": _arithmetic(getattr(operator, name), is_reflected=True) for name in _ARITHMETIC},
    **{f"__{name}__": _comparison(getattr(operator, name)) for name in _COMPARISONS},
}
for _kind in (_WatchedInt, _WatchedFloat):
    for _name, _operator in _OPERATORS.items():
        setattr(_kind, _name, _operator)


def watched_batch_idx(batch_idx: int, ask: Ask) -> int:
    """``batch_idx``; ``ask`` is told what it is compared with."""
    number: int = _watched(batch_idx, lambda progress: progress.batch_idx, ask)
    return number


@contextmanager
def progress_watched(trainer: pl.Trainer | None, ask: Ask) -> Iterator[None]:
    """Within, ``ask`` is told what ``trainer.global_step`` and ``current_epoch`` are compared with."""
    if trainer is None:
        yield
        return
    kind = type(trainer)
    properties = {name: getattr(kind, name) for name in ("global_step", "current_epoch")}
    own = {name: vars(kind)[name] for name in properties if name in vars(kind)}

    def watched(name: str) -> property:
        def get(asked: pl.Trainer) -> Any:
            ask(lambda progress: True)
            return _watched(properties[name].fget(asked), operator.attrgetter(name), ask)

        return property(get)

    for name in properties:
        setattr(kind, name, watched(name))
    try:
        yield
    finally:
        for name in properties:
            if name in own:
                setattr(kind, name, own[name])
            else:
                delattr(kind, name)
