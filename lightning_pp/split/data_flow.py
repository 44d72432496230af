"""Following values through the code between units, by a dispatch mode that sees every operation of a dry run."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from lightning_pp.split.placeholders import is_fake
from lightning_pp.split.record import Reads, UnitCall, Value

_SOURCES = "_pp_sources"
_TORCH_FOLDER = os.path.dirname(torch.__file__)
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))


@dataclass(frozen=True)
class Parameter:
    """Source of a value: the parameter of that name."""

    name: str


@dataclass(frozen=True)
class Inside:
    """Source of a value: made within that unit call."""

    call: int


Source = Value | Parameter | Inside
NOTHING: frozenset[Source] = frozenset()


def sources_of(tensor: Tensor) -> frozenset[Source]:
    """Where the value of ``tensor`` comes from; empty if it depends on the batch alone."""
    return getattr(tensor, _SOURCES, NOTHING)


def set_sources(tensor: Tensor, sources: Iterable[Source]) -> None:
    """Marks where the value of ``tensor`` comes from."""
    setattr(tensor, _SOURCES, frozenset(sources))


def storage_of(tensor: Tensor) -> int | None:
    """A number that tensors over the same memory share."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # sparse and other layouts have no storage


def user_line() -> str:
    """``file:line in function`` of the innermost caller that belongs neither to torch nor to this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<")) and "/contextlib.py" not in filename:
            return f"{filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def innermost_user_line(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame of ``error`` that is neither torch's nor this package's."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<"))]
    return f"{outside[-1].filename}:{outside[-1].lineno} in {outside[-1].name}" if outside else "an unknown line"


@dataclass
class ValueRead:
    """A weight-dependent value that Python looked at (``.item()``, ``if tensor:``) outside any unit."""

    line: str
    sources: frozenset[Source]
    num_calls_before: int


@dataclass
class DataFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries the sources of values from inputs to outputs of every operation.

    Real tensors stay real unless something fake was written into them (``out[:, 0] = cls``): from then on they read as
    fake, since what they hold is not what one device would hold.

    Attributes:
        reads: What the current stretch of code (a call and the glue before it, or the tail) needs.
        call: The unit call that is running, None in glue.
        dummy: What ``.item()`` on a fake gives: 1 or 0 in the dtype's own type.
    """

    fake_mode: Any
    dummy: int = 0
    reads: Reads = field(default_factory=Reads)
    call: UnitCall | None = None
    num_calls: int = 0
    own_parameters: frozenset[str] = frozenset()
    value_reads: list[ValueRead] = field(default_factory=list)
    edited: set[Value] = field(default_factory=set)
    glue_is_random: bool = False
    _output_storages: dict[int, Value] = field(default_factory=dict)
    _overwritten_storages: dict[int, frozenset[Source]] = field(default_factory=dict)
    # a storage is known by its address, so it must not be freed and given out again meanwhile
    _kept_alive: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def mark_output(self, tensor: Tensor, value: Value) -> None:
        """Makes ``tensor`` the source ``value``."""
        set_sources(tensor, {value})
        storage = storage_of(tensor)
        if storage is not None:
            self._output_storages[storage] = value
            self._kept_alive.append(tensor)

    def need(self, tensors: Iterable[Tensor]) -> None:
        """Records that ``tensors`` are needed by the current stretch of code."""
        for tensor in tensors:
            self._note(self._all_sources(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        sources: frozenset[Source] = NOTHING
        any_fake = False
        for tensor in inputs:
            any_fake = any_fake or is_fake(tensor)
            found = self._all_sources(tensor)
            if found:
                sources = sources | found if sources else found
        if self.call is None and torch.Tag.nondeterministic_seeded in func.tags:
            self.glue_is_random = True
        if not any_fake and not sources:
            return func(*args, **kwargs)
        self._note(sources)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read_value(args[0], sources)
        given = (args, kwargs)
        if self._overwritten_storages:
            args, kwargs = self._overwritten_as_fakes(args, kwargs)
        result = func(*args, **kwargs)
        self._count_flops(func, args, kwargs, result)
        produced: frozenset[Source] = frozenset({Inside(self.call.index)}) if self.call is not None else sources
        for tensor in tree_leaves(result):
            if is_fake(tensor):
                set_sources(tensor, produced)
        if func._schema.is_mutable:
            self._note_writes(func, *given, produced)
        return result

    def _all_sources(self, tensor: Tensor) -> frozenset[Source]:
        found = sources_of(tensor)
        if self._overwritten_storages:
            storage = storage_of(tensor)
            if storage is not None and storage in self._overwritten_storages:
                found = found | self._overwritten_storages[storage]
        return found

    def _note(self, sources: Iterable[Source]) -> None:
        current = self.call.index if self.call is not None else None
        for source in sources:
            if isinstance(source, Value):
                self.reads.values.add(source)
            elif isinstance(source, Inside):
                if source.call != current and source.call not in self.reads.escapes:
                    self.reads.escapes[source.call] = user_line()
            elif source.name not in self.own_parameters:
                self.reads.parameters.add(source.name)

    def _read_value(self, tensor: Tensor, sources: frozenset[Source]) -> bool | int | float | complex:
        if self.call is None:
            self.value_reads.append(ValueRead(user_line(), sources, self.num_calls))
        if tensor.dtype is torch.bool:
            return bool(self.dummy)
        if tensor.dtype.is_complex:
            return complex(self.dummy)
        return float(self.dummy) if tensor.dtype.is_floating_point else self.dummy

    def _count_flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            return
        flops = int(formula(*args, **kwargs, out_val=result))
        if self.call is not None:
            self.call.flops += flops
        else:
            self.reads.flops += flops

    def _note_writes(self, func: Any, args: Any, kwargs: Any, produced: frozenset[Source]) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(written):
                if not isinstance(tensor, Tensor):
                    continue
                storage = storage_of(tensor)
                if storage is None:
                    continue
                if storage in self._output_storages:
                    self.edited.add(self._output_storages[storage])
                # other views of this memory must know what was written into it
                before = self._overwritten_storages.get(storage, NOTHING)
                self._overwritten_storages[storage] = before | sources_of(tensor) | produced
                self._kept_alive.append(tensor)

    def _overwritten_as_fakes(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def convert(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and not is_fake(leaf):
                storage = storage_of(leaf)
                if storage is not None and storage in self._overwritten_storages:
                    fake = self.fake_mode.from_tensor(leaf.detach())
                    set_sources(fake, self._overwritten_storages[storage])
                    return fake
            return leaf

        converted: tuple[Any, Any] = tree_map(convert, (args, kwargs))
        return converted
