"""What code gets to know of the values in tensors: numbers that Python reads, contents, and shapes that hang on values.

Code that sees the same in all its looks, and goes by nothing else, does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split._torch_private import TorchDispatchMode, arg_tree_leaves
from lightning_pp.split.data.tree import map_leaves
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.unit_calls.call_arguments import fingerprint_of
from lightning_pp.split.unit_calls.interception import running_unit

_INDEX = torch.ops.aten.index.Tensor
_PACK = torch.ops.aten._pack_padded_sequence.default
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def values_looked_at(func: Any, args: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of the tensors that the operation ``func`` is given, those whose values decide more than values.

    Args:
        func: The operation.
        args: What it is given.
        inputs: The tensors in that.
    """
    if func is _INDEX:  # by places; only masks make shapes of their content
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return inputs if _looks(func) else ()


@cache
def _looks(func: Any) -> bool:
    return func in (_INDEX, _PACK) or any(tag in func.tags for tag in _TAGS)


def seen_in(result: Any) -> Any:
    """What is seen in the result of an operation that looks: numbers, and shapes of tensors."""
    return map_leaves(lambda leaf: tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf, result)


def content_of(tensor: Tensor) -> Any:
    """What is seen by who reads all of ``tensor``."""
    return tuple(tensor.shape), fingerprint_of((tensor,), {})


class LooksWatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, outside of units, ``on_seen`` is told what operations on tensors with data get to know of values."""

    def __init__(self, on_seen: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_seen = on_seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _looks(func):
            inputs = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
            looked_at = values_looked_at(func, args, inputs)
            if not all(map(is_fake, looked_at)) and not running_unit():
                self._on_seen(seen_in(result))
        return result
