"""Forward hooks on modules: finds those of the user, and replaces them for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_pp.split._torch_private import forward_hooks_of, forward_pre_hooks_of
from lightning_pp.split.record.step_record import HookPlace


def user_hooks(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """Hooks that are neither torch's nor this package's (sharding, weight norms), which go with the call."""
    return {key: hook for key, hook in hooks.items() if not module_of(hook).startswith(("torch.", "lightning_pp."))}


def module_of(hook: Any) -> str:
    """The name of the Python module that has defined a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))


@contextmanager
def without_hooks(hooks: dict[int, Any], removed: Mapping[int, Any]) -> Iterator[None]:
    """In the block, the hooks in ``removed`` are not called; the order is kept."""
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
def watched_hooks(unit: nn.Module, on_hook: Callable[..., Any]) -> Iterator[None]:
    """In the block, the user's forward hooks inside ``unit`` go to ``on_hook(place, hook, *arguments of the hook)``.

    The hooks of the unit itself are code between units and not inside.
    """
    counts: dict[tuple[str, int, bool], int] = {}

    def route(name: str, number: int, before: bool, hook: Any, *given: Any) -> Any:
        count = counts[name, number, before] = counts.get((name, number, before), -1) + 1
        return on_hook(HookPlace(name, number, before, count), hook, *given)

    originals: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for name, child in unit.named_modules():
        if not name:
            continue
        for hooks, before in ((forward_pre_hooks_of(child), True), (forward_hooks_of(child), False)):
            if hooks:
                own = user_hooks(hooks)
                originals.append((hooks, own))
                for number, (key, hook) in enumerate(own.items()):
                    hooks[key] = partial(route, name, number, before, hook)
    try:
        yield
    finally:
        for hooks, own in originals:
            hooks.update({key: hook for key, hook in own.items() if key in hooks})


def hook_at(unit: nn.Module, place: HookPlace) -> Any:
    """The user's hook at ``place``; None if it is gone."""
    module = unit.get_submodule(place.module)
    hooks = list(user_hooks(forward_pre_hooks_of(module) if place.before else forward_hooks_of(module)).values())
    return hooks[place.number] if place.number < len(hooks) else None
