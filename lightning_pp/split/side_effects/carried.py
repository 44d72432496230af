"""Side effects by which tensors leave units, on the stages: see ``watch`` for what they are.

On the stage that runs the unit they work by themselves, and :class:`SideEffectKeeper` keeps what other stages need; on
every other stage :class:`FakeSideEffects` does what the unit would have done: sets the attribute, appends the entry,
calls the hook, with what was received or with fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.split.data.tree import leaves_of, map_leaves
from lightning_pp.split.record.step_record import (
    ArgumentPlace,
    AttributePlace,
    Handed,
    HookPlace,
    PassedOn,
    SideEffect,
    UnitCall,
    Value,
)
from lightning_pp.split.record.unknown_numbers import UnknownNumber
from lightning_pp.split.side_effects.containers import ABSENT, add_entries, containers_in, last_entries, put_back
from lightning_pp.split.side_effects.hooks import hook_at, watched_hooks
from lightning_pp.split.side_effects.reach import Reached


class SideEffectKeeper:
    """Around one call of a unit that runs here: finds the tensors that left as side effects and are needed elsewhere.

    ``call`` is the call as the dry run saw it, and ``wanted`` are the values that other stages need.
    """

    def __init__(
        self, call: UnitCall, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Collection[Value]
    ) -> None:
        self._call = call
        self._unit = unit
        self._arguments = containers_in((args, kwargs)) if call.side_effects else {}
        self._side_effects = [
            effect
            for effect in call.side_effects
            if any(isinstance(leaf, Handed) and leaf.value in wanted for leaf in leaves_of(effect.content))
        ]
        self._wanted = wanted
        self._kept: dict[Value, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the call."""
        waiting = {effect.place: effect for effect in self._side_effects if isinstance(effect.place, HookPlace)}
        if not waiting:
            yield
            return

        def keep(place: HookPlace, hook: Any, *given: Any) -> Any:
            if place in waiting:
                self._keep(waiting.pop(place), given[1:])
            return hook(*given)

        with watched_hooks(self._unit, keep):
            yield

    def kept(self) -> dict[Value, Tensor]:
        """After the call: the wanted values that left as side effects.

        Raises:
            SplitError: The unit did not leave what the dry run saw it leave.
        """
        for effect in self._side_effects:
            place = effect.place
            if isinstance(place, AttributePlace):
                left = self._unit.get_submodule(place.module).__dict__.get(place.key)
                self._keep(effect, last_entries(left, effect.content) if place.grows else left)
            elif isinstance(place, ArgumentPlace):
                self._keep(effect, last_entries(self._arguments[place.path], effect.content))
            missing = [
                leaf.value
                for leaf in leaves_of(effect.content)
                if isinstance(leaf, Handed) and leaf.value in self._wanted and leaf.value not in self._kept
            ]
            if missing:
                raise SplitError(
                    f"Another stage needs what the unit {self._call.unit!r} left in {place} in the dry run, but now it "
                    "left something else for the same shapes. What a unit leaves there must not depend on values."
                )
        return self._kept

    def _keep(self, effect: SideEffect, left: Any) -> None:
        noted, tensors = leaves_of(effect.content), leaves_of(left)
        if len(noted) != len(tensors):
            return
        for leaf, tensor in zip(noted, tensors, strict=True):
            if isinstance(leaf, Handed) and leaf.value in self._wanted and isinstance(tensor, Tensor):
                self._kept[leaf.value] = tensor


class FakeSideEffects:
    """Makes the side effects of units that do not run here, and undoes them when the step has ended.

    Args:
        with_made_up: Whether numbers that depend on values are those that made-up data gave; else they are unknown.
    """

    def __init__(self, *, with_made_up: bool = False) -> None:
        self._with_made_up = with_made_up
        self._undo: list[Callable[[], None]] = []

    def leave(
        self,
        call: UnitCall,
        unit: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor_of: Callable[[Value], Any],
    ) -> None:
        """Leaves what ``call``, as the dry run saw it, would have left, with ``tensor_of(value)`` for each value."""
        if not call.side_effects:
            return
        given = leaves_of((args, kwargs))
        containers = containers_in((args, kwargs))

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, Handed):
                return tensor_of(leaf.value)
            if isinstance(leaf, UnknownNumber) and self._with_made_up:
                return leaf.made_up
            return given[leaf.position] if isinstance(leaf, PassedOn) else leaf

        for effect in call.side_effects:
            place, content = effect.place, map_leaves(fake, effect.content)
            if isinstance(place, HookPlace):
                hook = hook_at(unit, place)
                if hook is not None:
                    hook(unit.get_submodule(place.module), *content)
                continue
            if isinstance(place, ArgumentPlace):
                add_entries(containers[place.path], content)
                continue
            attributes = unit.get_submodule(place.module).__dict__
            if place.grows:
                container = attributes[place.key]
                self._undo.append(Reached("", container).restore)
                add_entries(container, content)
            else:
                self._undo.append(partial(put_back, attributes, place.key, attributes.get(place.key, ABSENT)))
                attributes[place.key] = content

    def undo(self) -> None:
        """Puts everything back."""
        while self._undo:
            self._undo.pop()()
