"""Side effects of a unit call: attributes, entries in lists among its arguments, calls of hooks inside.

``block.aux_loss = ...``, ``router_logits.append(...)`` and a forward hook on a router inside a block are side effects
by which tensors leave a unit. A dry run finds them here; what stages do about them is in
:mod:`lightning_pp.split.side_effects.carried`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from lightning_pp.split._torch_private import COMPILED_CALL, HELD_BY_RECURRENT_LAYERS
from lightning_pp.split.data.tree import leaves_of, map_leaves
from lightning_pp.split.record.step_record import ArgumentPlace, AttributePlace, HookPlace, PassedOn, SideEffect
from lightning_pp.split.record.unknown_numbers import PLAIN, UnknownNumber
from lightning_pp.split.side_effects.containers import CONTAINERS, add_entries, containers_in, new_entries
from lightning_pp.split.side_effects.hooks import watched_hooks
from lightning_pp.split.side_effects.reach import Reached, reached_from

_TORCHS_OWN = frozenset(vars(nn.Module())) | HELD_BY_RECURRENT_LAYERS | {COMPILED_CALL, "forward"}

# Gives a tensor that leaves as a side effect its identity: what takes its place in the step, and what is noted of it.
_Mark = Callable[[Tensor], tuple[Tensor, Any]]


_Place = AttributePlace | ArgumentPlace


class SideEffectWatch:
    """Around one unit call of a dry run.

    Hooks inside the unit are called after it, on marked tensors, as code between units; that is what they are on the
    stages that do not run the unit. A hook that changes what a module returns is part of the unit instead.
    """

    def __init__(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._unit = unit
        self._before = [(name, child.__dict__, dict(child.__dict__)) for name, child in unit.named_modules()]
        held = [
            value
            for _, _, attributes in self._before
            for key, value in attributes.items()
            if key not in _TORCHS_OWN and type(value) in CONTAINERS
        ]
        self._arguments = containers_in((args, kwargs))
        # the unit may run more than once, and a cache that grew in one run would be too long in the next
        self._given = reached_from((args, kwargs), "")
        self._contents = {id(value): Reached("", value) for value in [*held, *self._arguments.values()]}
        self._deferred: list[tuple[HookPlace, Any, tuple[Any, ...]]] = []
        # what is left besides tensors and depends on values: by place, by number among the leaves
        self.unknown: dict[_Place, dict[int, UnknownNumber]] = {}

    def left_behind(self) -> dict[_Place, list[Any]]:
        """What the run has set on modules and added to lists, dicts and objects in the arguments, as leaves."""
        left: dict[_Place, list[Any]] = {
            AttributePlace(name, key, grows=False): leaves_of(value)
            for name, attributes, before in self._before
            for key, value in attributes.items()
            if key not in _TORCHS_OWN and not (key in before and before[key] is value)
        }
        for path, container in self._arguments.items():
            left[ArgumentPlace(path)] = leaves_of(new_entries(container, self._contents[id(container)].content))
        return left

    @contextmanager
    def attempt(self, part_of_unit: Collection[Any]) -> Iterator[None]:
        """Around one run of the unit: what an earlier one left is undone, hooks are kept for later.

        Args:
            part_of_unit: Hooks that are called where they are.
        """
        for _, attributes, before in self._before:
            for key in [key for key in attributes if key not in before]:
                del attributes[key]
            attributes.update({key: value for key, value in before.items() if attributes.get(key) is not value})
        for reached in (*self._contents.values(), *self._given):
            reached.restore()
        self._deferred.clear()

        def keep(place: HookPlace, hook: Any, *given: Any) -> Any:
            if any(hook is other for other in part_of_unit):
                return hook(*given)
            self._deferred.append((place, hook, given))
            return None

        with watched_hooks(self._unit, keep):
            yield

    def side_effects(self, mark: _Mark, passed_on: Callable[[Tensor], int | None]) -> Iterator[SideEffect]:
        """Yields what the unit left behind, and puts marked tensors in its place.

        ``mark`` marks a tensor; ``passed_on`` is its place among the arguments, if it is one of them.

        Raises:
            ChangingHookError: A hook changes its arguments.
        """

        def note(tree: Any, unknown: Mapping[int, UnknownNumber] = MappingProxyType({})) -> tuple[Any, Any]:
            marked: list[Any] = []

            def handed(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    marked.append(leaf)
                    return unknown.get(len(marked) - 1, leaf)
                position = passed_on(leaf)
                tensor, noted = (leaf, PassedOn(position=position)) if position is not None else mark(leaf)
                marked.append(tensor)
                return noted

            content = map_leaves(handed, tree)
            replacements = iter(marked)
            return content, map_leaves(lambda _: next(replacements), tree)

        for name, attributes, before in self._before:
            for key, value in list(attributes.items()):
                if key in _TORCHS_OWN or isinstance(value, nn.Parameter):
                    continue
                if key in before and before[key] is value:
                    yield from self._grown(AttributePlace(name, key, grows=True), value, note)
                elif _can_be_sent(value, or_plain=True):
                    attribute = AttributePlace(name, key, grows=False)
                    content, attributes[key] = note(value, self.unknown.get(attribute, {}))
                    yield SideEffect(attribute, content)
        for path, container in self._arguments.items():
            note_left = partial(note, unknown=self.unknown.get(ArgumentPlace(path), {}))
            yield from self._grown(ArgumentPlace(path), container, note_left, or_plain=True)
        for place, hook, given in self._deferred:
            content, marked = note(given[1:])
            result = hook(given[0], *marked)
            if result is not None and result is not marked[-1]:
                raise ChangingHookError(hook)
            yield SideEffect(place, content)

    def _grown(
        self, place: Any, container: Any, note: Callable[[Any], tuple[Any, Any]], *, or_plain: bool = False
    ) -> Iterator[SideEffect]:
        if id(container) not in self._contents:
            return
        before = self._contents[id(container)]
        new = new_entries(container, before.content)
        if new and _can_be_sent(new, or_plain=or_plain):
            content, marked = note(new)
            before.restore()
            add_entries(container, marked)
            # the same list may be an attribute of several modules
            del self._contents[id(container)]
            yield SideEffect(place, content)


class ChangingHookError(Exception):
    """A hook inside a unit changes what a module takes or returns, so it is part of the unit.

    Attributes:
        hook: The hook.
    """

    def __init__(self, hook: Any) -> None:
        super().__init__(repr(hook))
        self.hook = hook


def _can_be_sent(tree: Any, *, or_plain: bool = False) -> bool:
    """Whether ``tree`` holds tensors, and besides them only what is the same for every batch of the same shapes.

    With ``or_plain`` it need not hold tensors.
    """
    leaves = leaves_of(tree)
    return (or_plain or any(isinstance(leaf, Tensor) for leaf in leaves)) and all(
        isinstance(leaf, (Tensor, *PLAIN)) and not isinstance(leaf, nn.Parameter) for leaf in leaves
    )
