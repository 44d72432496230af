"""Giving one object other methods for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(target: object, **methods: Callable[..., Any]) -> Iterator[None]:
    """Within, ``target`` has the given methods.

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
