"""Replaces methods of one object or of a class, and Python functions, for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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


@contextmanager
def redirected(function: Callable[..., Any], other: Callable[..., Any]) -> Iterator[None]:
    """In the block, a Python function runs ``other``, wherever and under whatever name it was imported.

    The function gets other code; no reference to it is exchanged.

    Args:
        function: The function; decorators around it stay.
        other: Called with the function as it was, and with the arguments of the call.
    """
    inner = inspect.unwrap(function)
    assert isinstance(inner, FunctionType)
    code, defaults, space = inner.__code__, inner.__defaults__, inner.__globals__
    called = partial(other, FunctionType(code, space, inner.__name__, defaults, inner.__closure__))
    space[name := f"_redirected_{id(called)}"] = called
    inner.__code__, inner.__defaults__ = _call_other.__code__.replace(co_names=(name,)), None
    try:
        yield
    finally:
        inner.__code__, inner.__defaults__ = code, defaults
        del space[name]


def _call_other(*args: Any, **kwargs: Any) -> Any:
    """Only its code is used, in a function whose globals have what is called."""
    return _other(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
