"""Operations by which code sees values in tensors: Python reads a number, or a shape depends on values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split._torch_private import OperationsMode, arg_tree_leaves
from lightning_pp.split.fakes.parameters import is_fake
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


class LooksWatched(OperationsMode):  # type: ignore[no-untyped-call]
    """Within, ``on_look`` is called when code outside units sees values of tensors that have data."""

    def __init__(self, on_look: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_look = on_look

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation."""
        result = func(*args, **kwargs)
        if _looks(func):
            inputs = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
            looked_at = values_looked_at(func, args, inputs)
            if not all(map(is_fake, looked_at)) and not running_unit():
                self._on_look()
        return result
