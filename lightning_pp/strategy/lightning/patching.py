"""Replaces methods of one object, or of a class, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any


class InPlaceOf:
    """A callable that replaces ``original`` and has its attributes: it may be an object of the user.

    Attributes:
        original: What was there before.
    """

    original: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        vars(self).update(function=function, original=original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["function"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlaceOf:
        return self  # as functions are


def in_place_of(original: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``; in the place of an object that is no function, such as a Mock, with the attributes of that."""
    return function if isinstance(original, (FunctionType, MethodType)) else InPlaceOf(function, original)


@contextmanager
def replaced(target: object, **methods: Callable[..., Any]) -> Iterator[None]:
    """In the block, ``target`` has the given methods.

    They lie in the instance's ``__dict__``, put there past any ``__setattr__`` (of modules and metrics), and the class
    and other instances are not affected.
    """
    space = vars(target)
    before = {name: space[name] for name in methods if name in space}
    space.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del space[name]
        space.update(before)


@contextmanager
def replaced_in_class(kind: type, name: str, method: Any) -> Iterator[None]:
    """In the block, ``kind`` itself has ``method`` under ``name``, where it has another."""
    before = vars(kind)[name]
    setattr(kind, name, method)
    try:
        yield
    finally:
        setattr(kind, name, before)
