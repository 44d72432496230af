"""Forward hooks on modules: which are the user's, and taking their place for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any


def hooks_of_users(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """Hooks that are neither torch's nor this package's (sharding, weight norms), which go with the call."""
    return {key: hook for key, hook in hooks.items() if not _module_of(hook).startswith(("torch.", "lightning_pp."))}


def _module_of(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))


@contextmanager
def without_hooks(hooks: dict[int, Any], removed: Mapping[int, Any]) -> Iterator[None]:
    """Within, the hooks in ``removed`` are not called; the order is kept."""
    before = dict(hooks)
    for key in removed:
        del hooks[key]
    try:
        yield
    finally:
        added = {key: hook for key, hook in hooks.items() if key not in before}
        hooks.clear()
        hooks.update({**before, **added})


@contextmanager
def with_replaced_hooks(replaced: Sequence[tuple[dict[int, Any], Mapping[int, Any]]]) -> Iterator[None]:
    """Within, in each dict of hooks those of the same keys are others; the order is kept."""
    originals = [(hooks, {key: hooks[key] for key in others}) for hooks, others in replaced]
    for hooks, others in replaced:
        hooks.update(others)
    try:
        yield
    finally:
        for hooks, before in originals:
            hooks.update({key: hook for key, hook in before.items() if key in hooks})
