"""Intercepting the calls of units, for the time of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import nn


class CallHandler(Protocol):
    """Decides what a unit call does; ``original`` runs it as if nobody had looked."""

    def __call__(
        self, unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


_num_running = 0


def running_unit() -> bool:
    """Whether a unit is running now, as opposed to the code between units."""
    return _num_running > 0


class UnitCalls:
    """Routes every call of the given units through a handler while one is in charge.

    ``Module.__call__`` looks up ``_compiled_call_impl`` on the instance before anything else; setting it there takes in
    the whole call, hooks included (a hook of an un-owned unit must not run a second time on a received output), and
    leaves the class alone. A unit whose ``forward`` is called directly is caught as well. Both are undone on exit, so
    between steps a unit is as the user made it, and checkpointed blocks re-run in backward untouched.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._units = dict(units)
        self._running_original = False

    @contextmanager
    def handled_by(self, handler: CallHandler) -> Iterator[None]:
        """Routes unit calls through ``handler`` within the context."""
        saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for name, unit in self._units.items():
            attributes = unit.__dict__
            saved.append((attributes, {key: attributes[key] for key in _PATCHED if key in attributes}))
            call = attributes.get("_compiled_call_impl") or unit._call_impl
            attributes["_compiled_call_impl"] = partial(self._route, handler, name, call)
            attributes["forward"] = partial(self._route, handler, name, unit.forward)
        self._running_original = False
        try:
            yield
        finally:
            self._running_original = False
            for attributes, original in saved:
                for key in _PATCHED:
                    attributes.pop(key, None)
                attributes.update(original)

    def _route(self, handler: CallHandler, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running_original:
            return original(*args, **kwargs)
        return handler(name, partial(self._run, original), args, kwargs)

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        global _num_running
        self._running_original = True
        _num_running += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._running_original = False
            _num_running -= 1


_PATCHED = ("_compiled_call_impl", "forward")
