"""What a unit call leaves behind besides its outputs: attributes, entries in lists it was given, calls of hooks inside.

``block.aux_loss = ...``, ``router_logits.append(...)`` and a forward hook on a router inside a block are doors by
which tensors leave a unit. A dry run finds them (:class:`DoorWatch`). On the stage that runs the unit they work by
themselves, and :class:`DoorKeeper` keeps what other stages need; on every other stage :class:`StandInDoors` does what
the unit would have done: sets the attribute, appends the entry, calls the hook, with what was received or with fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.split.argument_objects import ArgumentObjects, attributes_of
from lightning_pp.split.hooks import hooks_of_users, with_replaced_hooks
from lightning_pp.split.record import ArgumentPlace, AttributePlace, Door, Handed, HookPlace, PassedOn, UnitCall, Value
from lightning_pp.split.tree import children_of, leaves_of, map_leaves

_CONTAINERS = (list, dict)
_PLAIN = (bool, int, float, str, type(None))
_TORCHS_OWN = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "forward", "_flat_weights", "_flat_weight_refs"}

# Gives a tensor that leaves by a door its identity: what takes its place in the step, and what a door notes of it.
_Mark = Callable[[Tensor], tuple[Tensor, Any]]


class DoorWatch:
    """Around one unit call of a dry run.

    Hooks inside the unit are called after it, on marked tensors, as code between units; that is what they are on the
    stages that do not run the unit. A hook that changes what a module returns is part of the unit instead.

    Args:
        unit: The unit.
        args: What it is called with.
        kwargs: What it is called with by name.
    """

    def __init__(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._unit = unit
        self._before = [(name, child.__dict__, dict(child.__dict__)) for name, child in unit.named_modules()]
        held = [
            value
            for _, _, attributes in self._before
            for key, value in attributes.items()
            if key not in _TORCHS_OWN and type(value) in _CONTAINERS
        ]
        self._arguments = _containers_in((args, kwargs))
        self._objects = ArgumentObjects((args, kwargs))
        self._contents = {id(value): (value, value.copy()) for value in [*held, *self._arguments.values()]}
        self._deferred: list[tuple[HookPlace, Any, tuple[Any, ...]]] = []

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
        for value, content in self._contents.values():
            _set_content(value, content)
        self._objects.restore()
        self._deferred.clear()

        def keep(place: HookPlace, hook: Any, *given: Any) -> Any:
            if any(hook is other for other in part_of_unit):
                return hook(*given)
            self._deferred.append((place, hook, given))
            return None

        with _watched_hooks(self._unit, keep):
            yield

    def doors(self, mark: _Mark, passed_on: Callable[[Tensor], int | None]) -> Iterator[Door]:
        """Yields what the unit left behind, and puts marked tensors in its place.

        Args:
            mark: Marks a tensor.
            passed_on: The place of a tensor among the arguments, if it is one of them.

        Raises:
            ChangingHookError: A hook changes what it was given.
        """

        def note(tree: Any) -> tuple[Any, Any]:
            marked: list[Any] = []

            def handed(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    marked.append(leaf)
                    return leaf
                position = passed_on(leaf)
                tensor, noted = (leaf, PassedOn(position)) if position is not None else mark(leaf)
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
                elif _can_be_handed_on(value):
                    content, attributes[key] = note(value)
                    yield Door(AttributePlace(name, key, grows=False), content)
        for path, container in self._arguments.items():
            yield from self._grown(ArgumentPlace(path), container, note)
        for place, hook, given in self._deferred:
            content, marked = note(given[1:])
            result = hook(given[0], *marked)
            if result is not None and result is not marked[-1]:
                raise ChangingHookError(hook)
            yield Door(place, content)

    def _grown(self, place: Any, container: Any, note: Callable[[Any], tuple[Any, Any]]) -> Iterator[Door]:
        if id(container) not in self._contents:
            return
        new = _new_entries(container, self._contents[id(container)][1])
        if new and _can_be_handed_on(new):
            content, marked = note(new)
            _set_content(container, self._contents[id(container)][1])
            _add_entries(container, marked)
            # the same list may be an attribute of several modules
            del self._contents[id(container)]
            yield Door(place, content)


class ChangingHookError(Exception):
    """A hook inside a unit changes what a module takes or returns, so it is part of the unit.

    Attributes:
        hook: The hook.
    """

    def __init__(self, hook: Any) -> None:
        super().__init__(repr(hook))
        self.hook = hook


class DoorKeeper:
    """Around one call of a unit that runs here: finds the tensors that left by a door and are needed elsewhere.

    Args:
        call: The call, as the dry run saw it.
        unit: The unit.
        args: What it is called with.
        kwargs: What it is called with by name.
        wanted: Values that other stages need.
    """

    def __init__(
        self, call: UnitCall, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Collection[Value]
    ) -> None:
        self._call = call
        self._unit = unit
        self._arguments = _containers_in((args, kwargs)) if call.doors else {}
        self._doors = [
            door
            for door in call.doors
            if any(isinstance(leaf, Handed) and leaf.value in wanted for leaf in leaves_of(door.content))
        ]
        self._wanted = wanted
        self._kept: dict[Value, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the call."""
        waiting = {door.place: door for door in self._doors if isinstance(door.place, HookPlace)}
        if not waiting:
            yield
            return

        def keep(place: HookPlace, hook: Any, *given: Any) -> Any:
            if place in waiting:
                self._keep(waiting.pop(place), given[1:])
            return hook(*given)

        with _watched_hooks(self._unit, keep):
            yield

    def kept(self) -> dict[Value, Tensor]:
        """After the call: the wanted values that left by doors.

        Raises:
            SplitError: The unit did not leave what the dry run saw it leave.
        """
        for door in self._doors:
            place = door.place
            if isinstance(place, AttributePlace):
                left = self._unit.get_submodule(place.module).__dict__.get(place.key)
                self._keep(door, _last_entries(left, door.content) if place.grows else left)
            elif isinstance(place, ArgumentPlace):
                self._keep(door, _last_entries(self._arguments[place.path], door.content))
            missing = [
                leaf.value
                for leaf in leaves_of(door.content)
                if isinstance(leaf, Handed) and leaf.value in self._wanted and leaf.value not in self._kept
            ]
            if missing:
                raise SplitError(
                    f"The unit {self._call.unit!r} did not leave {place} as the dry run of a batch of the same shapes "
                    "saw it do, and another stage needs it. It must leave the same whatever the values are."
                )
        return self._kept

    def _keep(self, door: Door, left: Any) -> None:
        noted, tensors = leaves_of(door.content), leaves_of(left)
        if len(noted) != len(tensors):
            return
        for leaf, tensor in zip(noted, tensors, strict=True):
            if isinstance(leaf, Handed) and leaf.value in self._wanted and isinstance(tensor, Tensor):
                self._kept[leaf.value] = tensor


class StandInDoors:
    """Leaves behind what units that do not run here would, and takes it back when the step has ended."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def leave(
        self,
        call: UnitCall,
        unit: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor_of: Callable[[Value], Any],
    ) -> None:
        """Leaves what ``call`` would have left.

        Args:
            call: The call, as the dry run saw it.
            unit: The unit.
            args: What it is called with.
            kwargs: What it is called with by name.
            tensor_of: What stands in for a value.
        """
        if not call.doors:
            return
        given = leaves_of((args, kwargs))
        containers = _containers_in((args, kwargs))

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, Handed):
                return tensor_of(leaf.value)
            return given[leaf.position] if isinstance(leaf, PassedOn) else leaf

        for door in call.doors:
            place, content = door.place, map_leaves(stand_in, door.content)
            if isinstance(place, HookPlace):
                hook = _hook_at(unit, place)
                if hook is not None:
                    hook(unit.get_submodule(place.module), *content)
                continue
            if isinstance(place, ArgumentPlace):
                _add_entries(containers[place.path], content)
                continue
            attributes = unit.get_submodule(place.module).__dict__
            if place.grows:
                container = attributes[place.key]
                self._undo.append(partial(_set_content, container, container.copy()))
                _add_entries(container, content)
            else:
                self._undo.append(partial(_restore, attributes, place.key, attributes.get(place.key, _MISSING)))
                attributes[place.key] = content

    def undo(self) -> None:
        """Puts everything back."""
        while self._undo:
            self._undo.pop()()


_MISSING = object()


def _restore(attributes: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        attributes.pop(key, None)
    else:
        attributes[key] = value


@contextmanager
def _watched_hooks(unit: nn.Module, on_hook: Callable[..., Any]) -> Iterator[None]:
    """Within, the user's forward hooks inside ``unit`` go to ``on_hook(place, hook, *what the hook is given)``.

    The hooks of the unit itself are code between units and not inside.
    """
    counts: dict[tuple[str, int, bool], int] = {}

    def route(name: str, number: int, before: bool, hook: Any, *given: Any) -> Any:
        count = counts[name, number, before] = counts.get((name, number, before), -1) + 1
        return on_hook(HookPlace(name, number, before, count), hook, *given)

    def replacements(name: str, hooks: Mapping[int, Any], before: bool) -> dict[int, Any]:
        return {
            key: partial(route, name, number, before, hook)
            for number, (key, hook) in enumerate(hooks_of_users(hooks).items())
        }

    replaced = []
    for name, child in unit.named_modules():
        if not name:
            continue
        for hooks, before in ((child._forward_pre_hooks, True), (child._forward_hooks, False)):
            if hooks:
                replaced.append((hooks, replacements(name, hooks, before)))
    with with_replaced_hooks(replaced):
        yield


def _hook_at(unit: nn.Module, place: HookPlace) -> Any:
    module = unit.get_submodule(place.module)
    hooks = list(hooks_of_users(module._forward_pre_hooks if place.before else module._forward_hooks).values())
    return hooks[place.number] if place.number < len(hooks) else None


def _containers_in(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[tuple[int | str, ...], Any]:
    """The lists and dicts in the arguments that their owner can still see once a unit has written into them."""
    found: dict[tuple[int | str, ...], Any] = {}
    seen: set[int] = set()

    def visit(node: Any, path: tuple[int | str, ...]) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if type(node) in _CONTAINERS:
            found[path] = node
        children: Any = list(enumerate(children_of(node))) or attributes_of(node).items()
        for key, child in children:
            visit(child, (*path, key))

    args, kwargs = arguments
    for number, child in enumerate((*args, *kwargs.values())):
        visit(child, (number,))
    return found


def _can_be_handed_on(tree: Any) -> bool:
    """Whether ``tree`` holds tensors, and besides them only what is the same for every batch of the same shapes."""
    leaves = leaves_of(tree)
    return any(isinstance(leaf, Tensor) for leaf in leaves) and all(
        isinstance(leaf, (Tensor, *_PLAIN)) and not isinstance(leaf, nn.Parameter) for leaf in leaves
    )


def _new_entries(container: Any, before: Any) -> Any:
    """What was added to ``container``, and what took the place of something in a dict; nothing if anything is gone."""
    if isinstance(container, dict):
        if any(key not in container for key in before):
            return {}
        return {key: item for key, item in container.items() if key not in before or before[key] is not item}
    kept = container[: len(before)]
    if len(kept) < len(before) or any(mine is not theirs for mine, theirs in zip(kept, before, strict=True)):
        return []
    return container[len(before) :]


def _last_entries(container: Any, like: Any) -> Any:
    """The entries of ``container`` that correspond to those of ``like``, which were its newest."""
    if isinstance(like, dict):
        return {key: container.get(key) for key in like}
    return container[len(container) - len(like) :]


def _add_entries(container: Any, entries: Any) -> None:
    if isinstance(container, dict):
        container.update(entries)
    else:
        container.extend(entries)


def _set_content(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        if container.keys() != content.keys() or any(container[key] is not content[key] for key in content):
            container.clear()
            container.update(content)
    elif len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
        container[:] = content
