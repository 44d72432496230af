"""Earlier results of operations on fakes: they depend only on shapes and dtypes, and every microbatch repeats them.

Torch has a cache of the kind, which knows more (symbolic shapes, tracing). It takes three times as long, and is not
asked at all where a tensor with data is among the arguments. Without what is here a forward on one stage of GPT-2 or
Llama took 0.4 to 0.6 ms longer (benchmarks/costs/split_overhead.py with and without it, 2026-11-22).
Whatever is unusual is left to torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.split._torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    arg_tree_leaves,
    dispatch_keys_of,
    schema_of,
)
from lightning_pp.split.record.sources import storage_of

_MOST_RESULTS = 4096
_PLAIN = frozenset(
    {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# what these give depends on more than shapes and dtypes, or they change the shape of what they are given
_NOT_KNOWABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
# what it gives for a mask is no result on fakes
_INDEX = torch.ops.aten.index.Tensor


@dataclass(frozen=True, slots=True)
class _Layout:
    """Everything in a fake, to make it again.

    Attributes:
        shape: Its shape.
        stride: Its strides.
        offset: Where it begins in its memory.
        dtype: Its dtype.
        device: Where it pretends to be.
        is_view: Whether it lies in the memory of the operation's first argument, and not in its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_view: bool

    def fake(self, mode: FakeTensorMode, first: Any) -> FakeTensor:
        """Makes it; ``first`` is the operation's first argument."""
        if self.is_view:
            meta = torch.empty(0, dtype=self.dtype, device="meta")
            meta.set_(first.untyped_storage(), self.offset, self.shape, self.stride)
        else:
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(mode, meta, self.device)


_FIRST_ARGUMENT = object()
"""Used in place of layouts if the operation edits its first argument in place and returns it."""
# a layout, a list or tuple of them, or _FIRST_ARGUMENT; None: a result that cannot be made anew
_RESULTS: dict[Hashable, Any] = {}  # of all modes: each recording of a model has its own


class KnownResults:
    """Keeps the results of operations on fakes, and makes them again for one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._results = _RESULTS

    def result_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Any = None) -> Any:
        """The result of ``func``, made again if it is known; else that of ``run``, or ``NotImplemented`` without it."""
        key = self._key(func, args, kwargs)
        known = None if key is None else self._results.get(key)
        if known is None:
            given = NotImplemented if run is None else run()
            if key is not None and key not in self._results and given is not NotImplemented:
                self._add(key, func, args, kwargs, given)
            return given
        if known is _FIRST_ARGUMENT:
            return args[0]
        if type(known) is _Layout:
            return known.fake(self._mode, args[0] if args else None)
        return type(known)([layout.fake(self._mode, args[0] if args else None) for layout in known])

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
        """Everything on which the result depends, before the operation runs; None if that is not known."""
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        is_known = _describe(self._mode, args, key) and _describe(self._mode, kwargs.values(), key)
        return tuple(key) if is_known else None

    def _add(self, key: Hashable, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Any) -> None:
        result = _result(func, args, kwargs, given)
        if result is _FIRST_ARGUMENT and self._key(func, args, kwargs) != key:
            result = None  # it did not leave its argument in the shape in which it was
        if len(self._results) >= _MOST_RESULTS:  # a number that is another one each time, perhaps
            self._results.clear()
        self._results[key] = result


def _describe(mode: FakeTensorMode, values: Iterable[Any], key: list[Any]) -> bool:
    """Adds to ``key`` what an operation can know of ``values`` without data; False if that is more than is known."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            key += (kind, value)
        elif kind is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None:
                return False
            key += (FakeTensor, value.fake_device)
            _describe_tensor(value, key)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _describe(mode, value, key):
                return False
        elif kind is Tensor or kind is nn.Parameter:
            if value.layout is not torch.strided:
                return False
            key += (Tensor, value.device)
            _describe_tensor(value, key)
        else:
            return False
    return True


def _describe_tensor(tensor: Tensor, key: list[Any]) -> None:
    # the dispatch keys tell conjugated, quantized, nested and sparse tensors and those of inference mode
    keys = dispatch_keys_of(tensor)
    key += (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad, keys)


def _result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Any) -> Any:
    """What :class:`KnownResults` remembers of the result ``given``."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return None
    if func is not _INDEX and any(tag in func.tags for tag in _NOT_KNOWABLE):
        return None
    written = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema_of(func).arguments
    ]
    if any(written):
        edits_first = written[0] and not any(written[1:]) and args and given is args[0] and type(given) is FakeTensor
        return _FIRST_ARGUMENT if edits_first else None
    # each lies in the memory of the first argument or in memory of its own
    memories = {storage_of(leaf) for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)}
    first = args[0] if args and type(args[0]) is FakeTensor else None
    layouts = []
    container = next((kind for kind in (list, tuple) if isinstance(given, kind)), None)
    for tensor in (given,) if container is None else given:
        if type(tensor) is not FakeTensor:
            return None
        memory = storage_of(tensor)
        is_view = first is not None and memory == storage_of(first)
        layout = _layout(tensor, first, is_view)
        if layout is None or (not is_view and memory in memories):
            return None
        layouts.append(layout)
        memories.add(memory)
    return layouts[0] if container is None else container(layouts)


def _layout(tensor: FakeTensor, first: FakeTensor | None, is_view: bool) -> _Layout | None:
    """Everything in ``tensor``; None if a tensor made from it would differ."""
    if tensor.layout is not torch.strided or tensor.requires_grad:
        return None
    layout = _Layout(
        tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.fake_device, is_view
    )
    remade = layout.fake(tensor.fake_mode, first)
    before: list[Any] = [tensor.untyped_storage().nbytes(), vars(tensor)]
    after: list[Any] = [remade.untyped_storage().nbytes(), vars(remade)]
    _describe_tensor(tensor, before)
    _describe_tensor(remade, after)
    return layout if before == after else None
