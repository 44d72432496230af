"""What operations on fakes gave before: that depends on shapes and dtypes only, and every microbatch does the same.

Torch has a cache of the kind, which knows more (symbolic shapes, tracing). It takes three times as long, and is not
asked at all where a tensor with data is among the arguments. Without what is here a forward on one stage of GPT-2 or
Llama took 0.4 to 0.6 ms longer (benchmarks/costs/split_overhead.py with and without it, 2026-11-22).
Whatever is unusual is left to torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.split._torch_private import FakeTensor, FakeTensorMode, OpOverload, dispatch_keys_of, schema_of
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
    """All that a fake consists of, to make it anew.

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


@dataclass(frozen=True, slots=True)
class _Result:
    """What an operation gives.

    Attributes:
        layouts: Of the tensors; None: its first argument, which it edits in place.
        container: What they are in; None for a single tensor.
    """

    layouts: tuple[_Layout, ...] | None
    container: type[list[Any]] | type[tuple[Any, ...]] | None = None


class KnownResults:
    """Remembers what operations gave on the fakes of one mode."""

    def __init__(self) -> None:
        # None: an operation whose result cannot be made from this
        self._results: dict[Hashable, _Result | None] = {}

    @staticmethod
    def key(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
        """All that the result depends on, as it is before the operation runs; None where that cannot be told."""
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not _describe(mode, args, key):
            return None
        if kwargs:
            key += kwargs
            if not _describe(mode, kwargs.values(), key):
                return None
        return tuple(key)

    def has(self, key: Hashable) -> bool:
        """Whether :meth:`add` was called with ``key``, though its result may be none that can be made anew."""
        return key in self._results

    def find(self, mode: FakeTensorMode, key: Hashable, args: Sequence[Any]) -> Any:
        """What the operation of that key gives, made anew; None if it has to be asked."""
        result = self._results.get(key)
        if result is None:
            return None
        layouts = result.layouts
        if layouts is None:
            return args[0]
        if result.container is None:
            return layouts[0].fake(mode, args[0])
        return result.container([layout.fake(mode, args[0]) for layout in layouts])

    def add(
        self, mode: FakeTensorMode, key: Hashable, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Any
    ) -> None:
        """Remembers that the operation of that key gave ``given``."""
        result = _result(func, args, kwargs, given)
        if result is not None and result.layouts is None and self.key(mode, func, args, kwargs) != key:
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


def _result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Any) -> _Result | None:
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return None
    if func is not _INDEX and any(tag in func.tags for tag in _NOT_KNOWABLE):
        return None
    written = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema_of(func).arguments
    ]
    if any(written):
        edits_first = written[0] and not any(written[1:]) and args and given is args[0] and type(given) is FakeTensor
        return _Result(None) if edits_first else None
    container = next((kind for kind in (list, tuple) if isinstance(given, kind)), None)
    tensors = given if container is not None else (given,)
    # each lies in the memory of the first argument or in memory of its own
    memories = {storage_of(tensor) for tensor in _tensors_in((args, *kwargs.values()))}
    first = args[0] if args and type(args[0]) is FakeTensor else None
    layouts = []
    for tensor in tensors:
        if type(tensor) is not FakeTensor:
            return None
        memory = storage_of(tensor)
        is_view = first is not None and memory == storage_of(first)
        layout = _layout(tensor, first, is_view)
        if layout is None or (not is_view and memory in memories):
            return None
        layouts.append(layout)
        memories.add(memory)
    return _Result(tuple(layouts), container)


def _layout(tensor: FakeTensor, first: FakeTensor | None, is_view: bool) -> _Layout | None:
    """All that ``tensor`` consists of; None if what is made of that is not the same."""
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


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
