"""Operations that read values of tensors: Python reads a number, or a shape depends on values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split._torch_private import OperationsMode, arg_tree_leaves, tree_leaves
from lightning_pp.split.fakes.operation_work import flops_of
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.unit_calls.interception import running_unit

_INDEX = torch.ops.aten.index.Tensor
_PACK = torch.ops.aten._pack_padded_sequence.default
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def values_looked_at(func: Any, args: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of ``inputs``, the tensors that the operation ``func`` is given, those whose values decide more than values."""
    if func is _INDEX:  # by places; only masks make shapes of their content
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return inputs if _looks(func) else ()


@cache
def _looks(func: Any) -> bool:
    return func in (_INDEX, _PACK) or any(tag in func.tags for tag in _TAGS)


class StepWatch(OperationsMode):  # type: ignore[no-untyped-call]
    """Watches the operations of a rehearsal.

    ``num_calls`` returns the number of unit calls so far.

    Attributes:
        num_looks: How often code outside units saw values of tensors that have data.
        looks_in_units: The same inside units.
        draws: Calls after which code outside units drew random numbers, up to the next; -1: before the first.
        flops: Floating point operations on fakes, by the number of unit calls before them; None: within units.
    """

    def __init__(self, num_calls: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_calls = num_calls
        self.num_looks = self.looks_in_units = 0
        self.draws: set[int] = set()
        self.flops: dict[int | None, int] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation."""
        result = func(*args, **kwargs)
        if _looks(func):
            inputs = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
            looked_at = values_looked_at(func, args, inputs)
            if not all(map(is_fake, looked_at)):
                self.note_look()
        if torch.Tag.nondeterministic_seeded in func.tags and not running_unit():
            self.draws.add(self._num_calls() - 1)
        flops = flops_of(func, args, kwargs, result)
        if flops and any(map(is_fake, tree_leaves(result))):
            stretch = None if running_unit() else self._num_calls()
            self.flops[stretch] = self.flops.get(stretch, 0) + flops
        return result

    def note_look(self, *_: Any) -> None:
        """Code has read a value that is not a fake."""
        if running_unit():
            self.looks_in_units += 1
        else:
            self.num_looks += 1
