"""Intercepting the calls of units, for the time of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pp.errors import SplitError
from lightning_pp.split._torch_private import (
    COMPILED_CALL,
    call_of,
    current_function_mode,
    distributions_check_what_is_here,
    forward_hooks_of,
    forward_pre_hooks_of,
    has_forward_hooks,
    wants_keywords,
    without_current_function_mode,
)
from lightning_pp.split.data.tree import leaves_of, map_leaves
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.record.sources import sources_of
from lightning_pp.split.record.step_record import PassedOn
from lightning_pp.split.side_effects.containers import ABSENT, put_back
from lightning_pp.split.side_effects.hooks import user_hooks, without_hooks
from lightning_pp.split.unit_calls.checkpointed_regions import RAN, CheckpointedRegions, Region
from lightning_pp.split.unit_calls.compilation import compiled_again, uncompiled_outside_units

CallHandler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Decides what a unit call does. It gets the unit's name, a function that runs the unit unwatched, and the
arguments of the unit."""

_num_running = 0
_num_handled = 0


def running_unit() -> bool:
    """Whether a unit is running now, as opposed to the code between units."""
    return _num_running > 0


def gives_value(result: Any) -> bool:
    """Whether ``result``, of a function of torch, is a tensor that the code between units has made."""
    # while a unit call is handled, the unit runs, or what stands in for it is made
    return isinstance(result, Tensor) and not isinstance(result, nn.Parameter) and not _num_handled


class StandingBy(partial[Any]):
    """The ``forward`` of a unit that does not run, because an equivalent one has run."""


class OutsideUnits(TorchFunctionMode):
    """A function mode that is off while a unit runs, where it would only cost time."""


class UnitCalls:
    """Routes every call of the given units through a handler while one is in charge.

    ``Module.__call__`` looks up ``_compiled_call_impl`` on the instance before anything else; setting it there takes in
    the whole call and leaves the class alone. A unit whose ``forward`` is called directly is caught as well. Both are
    undone on exit, so between steps a unit is as the user made it.

    The user's forward hooks of a unit are code between units: they run on every stage, on what the handler returns, so
    that a hook that collects outputs collects those of other stages' units too. All other hooks belong to the call.

    A handler that does not run the unit may have :class:`~lightning_pp.split.record.step_record.PassedOn` in what it
    returns.

    Attributes:
        regions: The checkpointed regions around and inside of units.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._units = dict(units)
        self._handler: CallHandler | None = None
        self._is_installed = False
        self._running_original = False
        self._num_ran = 0
        self._patches: dict[str, _Patch] = {}
        self.regions = CheckpointedRegions(self._replaying)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the block, unit calls pass through here, and :meth:`handled_by` costs next to nothing.

        While no handler is in charge they go on as they are.
        """
        if self._is_installed:
            yield
            return
        saved: list[tuple[dict[str, Any], Any, Any]] = []
        with _plain_attention(), distributions_check_what_is_here(_is_missing), self.regions.remembered():
            self._is_installed = True
            try:
                for name, unit in self._units.items():
                    attributes = unit.__dict__
                    compiled = attributes.get(COMPILED_CALL, ABSENT)
                    saved.append((attributes, compiled, attributes.get("forward", ABSENT)))
                    originals = call_of(unit) if compiled in (None, ABSENT) else compiled, unit.forward
                    patch = self._patches.get(name)
                    if patch is None or patch.originals != originals:
                        call = self._patched(name, unit, originals[0], is_forward=False)
                        forward = self._patched(name, unit, originals[1], is_forward=True)
                        patch = self._patches[name] = _Patch(originals, call, forward)
                    attributes[COMPILED_CALL], attributes["forward"] = patch.call, patch.forward
                yield
            finally:
                self._is_installed = False
                for attributes, compiled, forward in saved:
                    put_back(attributes, COMPILED_CALL, compiled)
                    put_back(attributes, "forward", forward)

    def handled_by(self, handler: CallHandler) -> AbstractContextManager[None]:
        """Routes unit calls through ``handler`` within the context."""
        return _InCharge(self, handler) if self._is_installed else self._installed_for(handler)

    @contextmanager
    def _installed_for(self, handler: CallHandler) -> Iterator[None]:
        with self.installed(), _InCharge(self, handler):
            yield

    def _patched(
        self, name: str, unit: nn.Module, original: Callable[..., Any], *, is_forward: bool
    ) -> Callable[..., Any]:
        run = partial(self._run, original)

        def patched(*args: Any, **kwargs: Any) -> Any:
            handler = self._handler
            if handler is None or self._running_original:
                return original(*args, **kwargs)
            if not is_forward and has_forward_hooks(unit):
                return self._call_with_hooks(handler, name, unit, original, args, kwargs)
            return self._route(handler, name, run, args, kwargs)

        return patched

    def _call_with_hooks(
        self,
        handler: CallHandler,
        name: str,
        unit: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        before, after = user_hooks(forward_pre_hooks_of(unit)), user_hooks(forward_hooks_of(unit))
        if not before and not after:
            return self._route(handler, name, partial(self._run, call), args, kwargs)
        for key, hook in before.items():
            args, kwargs = _replaced_inputs(hook, unit, args, kwargs, wants_keywords(unit, key, before=True))

        def call_without(*args: Any, **kwargs: Any) -> Any:
            with without_hooks(forward_pre_hooks_of(unit), before), without_hooks(forward_hooks_of(unit), after):
                return call(*args, **kwargs)

        output = self._route(handler, name, partial(self._run, call_without), args, kwargs)
        for key, hook in after.items():
            given = (unit, args, kwargs) if wants_keywords(unit, key, before=False) else (unit, args)
            replacement = hook(*given, output)
            output = output if replacement is None else replacement
        return output

    def _route(
        self, handler: CallHandler, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        global _num_handled
        num_ran = self._num_ran
        given: Any = RAN
        _num_handled += 1
        try:
            output = handler(name, run, args, kwargs)
            if self._num_ran == num_ran:
                if not isinstance(output, Tensor):
                    output = with_passed_on(output, args, kwargs)
                given = output
        finally:
            _num_handled -= 1
            if self.regions.open:
                self.regions.note(given)
        return output

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        global _num_running
        self._running_original = True
        self._num_ran += 1
        _num_running += 1
        try:
            if not isinstance(current_function_mode(), OutsideUnits):
                return original(*args, **kwargs)
            with ExitStack() as stack:
                while isinstance(current_function_mode(), OutsideUnits):
                    stack.enter_context(without_current_function_mode())
                stack.enter_context(compiled_again())
                return original(*args, **kwargs)
        finally:
            self._running_original = False
            _num_running -= 1

    @contextmanager
    def _replaying(self, region: Region) -> Iterator[None]:
        remaining = list(reversed(region.calls))

        def replay(unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not remaining:
                raise SplitError(
                    f"A checkpointed function called the unit {unit!r} when backward ran it again, but not in forward. "
                    "It must call the same units both times."
                )
            given = remaining.pop()
            return original(*args, **kwargs) if given is RAN else given

        with self.handled_by(replay), ExitStack() as stack:
            if region.num_functions:  # they were followed, which compiled code cannot be
                stack.enter_context(uncompiled_outside_units())
                stack.enter_context(_ReplayedFunctions(region))
            yield


class _ReplayedFunctions(OutsideUnits):
    """Within, functions between units return tensors received in a region's first run."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._received = region.received
        self._num_functions = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        result = func(*args, **(kwargs or {}))
        if not gives_value(result):
            return result
        found = self._received.get(self._num_functions)
        self._num_functions += 1
        if found is None:
            return result
        name, received = found
        if getattr(func, "__name__", "") != name or result.shape != received.shape:
            raise SplitError(
                f"A checkpointed function ran {getattr(func, '__name__', func)!r} between units when backward ran it "
                f"again, but {name!r} in forward. It must run the same operations both times."
            )
        return received


class _InCharge:
    """A handler in charge; a class, because a generator would cost more than the work itself."""

    __slots__ = ("_before", "_calls", "_handler")

    def __init__(self, calls: UnitCalls, handler: CallHandler) -> None:
        self._calls = calls
        self._handler = handler

    def __enter__(self) -> None:
        calls = self._calls
        self._before = calls._handler, calls._running_original
        calls._handler, calls._running_original = self._handler, False

    def __exit__(self, *_: object) -> None:
        calls = self._calls
        calls._handler, calls._running_original = self._before
        if calls._handler is None and calls.regions.open:
            calls.regions.close()


def with_passed_on(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The replacement of a unit's output, with values that it passes on taken from its arguments."""
    if not any(isinstance(leaf, PassedOn) for leaf in leaves_of(output)):
        return output
    given = leaves_of((args, kwargs))
    return map_leaves(lambda leaf: given[leaf.position] if isinstance(leaf, PassedOn) else leaf, output)


class _Patch(NamedTuple):
    """Replaces a unit's ``__call__`` and ``forward`` while they are the same as when this was made."""

    originals: tuple[Callable[..., Any], Callable[..., Any]]
    call: Callable[..., Any]
    forward: Callable[..., Any]


def _replaced_inputs(
    hook: Any, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], with_kwargs: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if with_kwargs:
        replaced = hook(unit, args, kwargs)
        return (args, kwargs) if replaced is None else replaced
    replacement = hook(unit, args)
    if replacement is None:
        return args, kwargs
    return replacement if isinstance(replacement, tuple) else (replacement,), kwargs


def _is_missing(tensor: Tensor) -> bool:
    return is_fake(tensor) or bool(sources_of(tensor))


@contextmanager
def _plain_attention() -> Iterator[None]:
    """In the block, torch's transformer layers do not switch to fused kernels in evaluation, which know no fakes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
