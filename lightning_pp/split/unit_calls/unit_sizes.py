"""The outputs of units for inputs of other sizes than recorded: found by running them on fakes, unwatched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_pp.split._torch_private import COMPILED_CALL, HELD_BY_RECURRENT_LAYERS
from lightning_pp.split.data.tree import entries_of, is_object, leaves_of
from lightning_pp.split.fakes.conversion import convertible_fakes
from lightning_pp.split.fakes.fake_mode import AsFake, NeedsDataError, attempts_untold
from lightning_pp.split.fakes.parameters import FakeParameters, is_fake
from lightning_pp.split.head.parts import HeadPart
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.record.sources import set_sources
from lightning_pp.split.record.step_record import OutputLeaf, PassedOn, StepRecord, UnitCall, Value, spec_of
from lightning_pp.split.record.unknown_numbers import PLAIN, UnknownNumber
from lightning_pp.split.side_effects.module_state import preserved_state
from lightning_pp.split.side_effects.watch import SideEffectWatch
from lightning_pp.split.unit_calls.call_arguments import fingerprint_of, numbers_of, shapes_of
from lightning_pp.split.unit_calls.compilation import uncompiled
from lightning_pp.split.unit_calls.compute_dtype import cast_activations
from lightning_pp.split.unit_calls.looks import StepWatch
from lightning_pp.split.unit_calls.python_reads import PythonReads

_MOST_KNOWN = 4096
# torch's own, and what modules of transformers know their place by, to find their part of a cache
_NO_SETTINGS = frozenset({*vars(nn.Module()), *HELD_BY_RECURRENT_LAYERS, "layer_idx"})


def can_be_resized(record: StepRecord) -> bool:
    """Whether a rehearsal of ``record``'s step shows every effect of other sizes."""
    leaves = (leaf.fake for call in record.calls for leaf in call.leaves)
    return not (
        any(call.left or not leaves_plain(call) for call in record.calls)
        or any(isinstance(fake, UnknownNumber) for fake in leaves)
        or record.updates
        or record.carried
        or record.failure
    )


def leaves_plain(call: UnitCall) -> bool:
    """Whether the side effects of a call are plain values only."""
    return all(type(leaf) in PLAIN for effect in call.side_effects for leaf in leaves_of(effect.content))


_Known = tuple[Sequence[Any], int]
"""The results of a unit for some arguments, and the FLOPs of its forward.

A result is for each leaf a fake, the :class:`PassedOn` of the recorded call, or a plain value.
"""


class UnitSizes:
    """Finds the outputs of units for arguments of other sizes, once for all units that are built alike."""

    def __init__(self, units: Mapping[str, nn.Module], fake_parameters: FakeParameters) -> None:
        self._units = units
        self._fakes = fake_parameters
        self._kinds: dict[str, Hashable] = {}
        self._known: dict[Hashable, _Known | None] = {}
        self._need_data: set[type[nn.Module]] = set()
        self._of_rehearsal: ExitStack | None = None

    def kinds(self) -> Hashable:
        """The settings of all units, without their tensors, which other ranks have."""
        modules = ((name, child) for unit in self._units.values() for name, child in unit.named_modules())
        return tuple((type(child), *_settings_of(child, is_unit=not name)) for name, child in modules)

    @contextmanager
    def in_rehearsal(self, *, from_start: bool) -> Iterator[None]:
        """Around a rehearsal: all parameters are fake, from its start or from the first unit that runs in it."""
        self._kinds.clear()  # attributes inside units may change
        own = self._fakes.own()
        try:
            with ExitStack() as self._of_rehearsal:
                if from_start or self._fakes.stand_for_shards:
                    self._make_fake()
                yield
        finally:  # the first unit may have run while the step had other tensors in their places (functional_call)
            for parameters, name, parameter in own:
                parameters[name] = parameter

    def _make_fake(self) -> None:
        stack, self._of_rehearsal = self._of_rehearsal, None
        if stack is not None:
            stack.enter_context(self._fakes.all_fake())

    def resized(
        self,
        call: UnitCall,
        dtype: torch.dtype | None,
        watch: StepWatch,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> UnitCall | None:
        """``call`` with what its unit returns for these arguments; ``call`` itself where that is the same.

        None where something else than sizes differs, or the unit cannot run without data. ``dtype`` is that of
        computation (None: as activations are), and ``watch`` watches the rehearsal.
        """
        looks_at = None if call.looks_at is None else fingerprint_of(args, kwargs)
        given = cast_activations(call, args, kwargs, dtype)
        key = (self._kind_of(call.unit), looks_at, torch.is_grad_enabled(), *_described(given))
        if type(self._units[call.unit]) in self._need_data:
            return None
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._run(call, watch, original, *given)
        known = self._known[key]
        if known is None or len(known[0]) != len(call.leaves):
            return None
        results, flops = known
        found = [self._leaf(call, place, leaf) for place, leaf in enumerate(results)]
        leaves = [leaf for leaf in found if leaf is not None]
        if len(leaves) < len(found):
            return None
        shapes, numbers = shapes_of(args, kwargs), numbers_of(args, kwargs)
        if shapes == call.shapes and all(leaf is old for leaf, old in zip(leaves, call.leaves, strict=True)):
            return call
        weight_flops = call.weight_flops * flops // call.flops if call.flops else 0
        resized = replace(call, shapes=shapes, numbers=numbers, looks_at=looks_at, leaves=leaves)
        resized.flops, resized.weight_flops = flops, weight_flops
        return resized

    def _leaf(self, call: UnitCall, place: int, leaf: Any) -> OutputLeaf | None:
        """The recorded leaf of that place, or one of another size; None where more than its size is another."""
        recorded = call.leaves[place]
        if recorded.spec is None:
            is_same = type(leaf) is type(recorded.fake) and leaf == recorded.fake
            return recorded if is_same else OutputLeaf(None, leaf) if type(leaf) in PLAIN else None
        if not isinstance(leaf, Tensor) or leaf.dtype != recorded.spec.dtype:
            return None
        if torch.is_grad_enabled() and leaf.requires_grad != recorded.requires_grad:
            return None
        if spec_of(leaf) == recorded.spec:
            return recorded
        fake = leaf.detach().clone()
        set_sources(fake, {Value(call.index, place)})
        return replace(recorded, spec=spec_of(leaf), fake=fake)

    def _run(
        self,
        call: UnitCall,
        watch: StepWatch,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Known | None:
        unit = self._units[call.unit]
        given = leaves_of((args, kwargs))
        left = SideEffectWatch(unit, args, kwargs)
        computing = nullcontext() if isinstance(unit, HeadPart) else self._fakes.computing(call.unit)
        flops, looks = watch.flops.get(None, 0), watch.looks_in_units
        try:
            with preserved_state(unit), self._without_data(), computing:
                output = original(*args, **kwargs)
                behind = list(left.side_effects(lambda tensor: (tensor, None), lambda _: None))
        except Exception:  # it may need data; a dry run knows what to do then
            self._need_data.add(type(unit))
            return None
        with left.attempt(()):  # objects in the arguments are as before
            pass
        if behind != call.side_effects or (call.looks_at is None and watch.looks_in_units > looks):
            return None
        leaves: list[Any] = []
        for place, leaf in enumerate(leaves_of(output)):
            recorded = call.leaves[place].fake if place < len(call.leaves) else None
            if isinstance(recorded, PassedOn) and leaf is given[recorded.position]:
                leaves.append(recorded)
            elif isinstance(leaf, Tensor):
                with AsFake(self._fakes.mode):  # nothing of the graph is kept
                    leaves.append(leaf.detach().clone().requires_grad_(leaf.requires_grad))
            else:
                leaves.append(leaf)
        return leaves, watch.flops.get(None, 0) - flops

    @contextmanager
    def _without_data(self) -> Iterator[None]:
        """In the block, a unit runs on fakes as in a dry run, and whatever needs data raises."""
        self._make_fake()
        with (
            PythonReads(is_fake, _refuse, _refuse),
            self._fakes.mode.making_up(False),
            uncompiled(),
            convertible_fakes(),
            attempts_untold(),
        ):
            yield

    def _kind_of(self, unit: str) -> Hashable:
        """What two units share that do the same with the same arguments."""
        if unit not in self._kinds:
            self._kinds[unit] = tuple(
                (name, type(child), *_settings_of(child, is_unit=not name), *_tensors_of(child))
                for name, child in self._units[unit].named_modules()
            )
        return self._kinds[unit]


def _settings_of(module: nn.Module, *, is_unit: bool) -> Iterator[Hashable]:
    for key, value in vars(module).items():
        is_replaced = is_unit and key in ("forward", COMPILED_CALL)  # where calls of it are intercepted
        if key == "training" or not (key in _NO_SETTINGS or is_replaced or isinstance(value, Tensor)):
            yield key, _outline(value)


def _tensors_of(module: nn.Module) -> Iterator[Hashable]:
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _outline(value: Any) -> Hashable:
    """A plain value, or the same of a tuple or list; of anything else which object it is."""
    if type(value) in PLAIN:
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), *map(_outline, value)
    return id(value)


def _described(given: Any) -> Iterator[Hashable]:
    """Everything that a unit can know of its arguments without reading data."""
    for leaf in leaves_of(given):
        if is_object(leaf):
            for place, entry in entries_of(leaf, ""):
                yield place, _described_leaf(entry)
        else:
            yield _described_leaf(leaf)


def _described_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, is_fake(leaf), leaf.requires_grad
    if type(leaf) in PLAIN or isinstance(leaf, (torch.dtype, torch.device, type, FunctionType)):
        return type(leaf), leaf
    return object()  # of which nothing is known: equal to no other


def _refuse(*_: Any) -> NoReturn:
    raise NeedsDataError("a value", user_line())
