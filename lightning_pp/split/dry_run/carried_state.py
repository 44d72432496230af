"""State that steps carry from batch to batch (``self.hidden``), found by a second run of the step in a dry run.

The first run leaves on the module what the step leaves there. In the second, on the same microbatch, the tensors among
it are marked as parameters are, so that the recording says whether the step uses them, and on which line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_pp.split._torch_private import buffers_of
from lightning_pp.split.data.tree import tensors_of
from lightning_pp.split.record.sources import Parameter, Source, set_sources, storage_of
from lightning_pp.split.record.step_record import CarriedState, StepRecord


class Left(NamedTuple):
    """The tensor that a step has left in one place of the module.

    Attributes:
        module: Name of the module.
        attribute: Name of its attribute or buffer.
        value: What it holds.
    """

    module: str
    attribute: str
    value: Any

    @property
    def source(self) -> Parameter:
        """The mark of the tensors in it; no parameter has such a name."""
        return Parameter(f"<attribute {self.module}.{self.attribute}>")


def buffers_outside(module: nn.Module, units: Mapping[str, nn.Module]) -> Iterator[Left]:
    """The buffers that no unit holds."""
    inside = tuple(f"{unit}." for unit in units)
    for name, child in module.named_modules():
        if name not in units and not name.startswith(inside):
            for key, buffer in buffers_of(child).items():
                if buffer is not None:
                    yield Left(name, key, buffer)


def rebound(before: list[Left], module: nn.Module) -> list[Left]:
    """Those of the buffers ``before`` the step that are other tensors now."""
    now = (left._replace(value=buffers_of(module.get_submodule(left.module)).get(left.attribute)) for left in before)
    return [left for left, old in zip(now, before, strict=True) if left.value is not old.value]


class LeftTensors:
    """The tensors that a step has left on the module and that depend on its batch, marked for a second run.

    Numbers are not among them: what steps make of those (a running mean) moves by the batch's mean.
    """

    def __init__(self, left: list[Left], depends_on_batch: Callable[[Tensor], bool]) -> None:
        self._left: dict[Source, Left] = {}
        self._marked: list[Tensor] = []
        self.by_storage: dict[int, frozenset[Source]] = {}
        for each in left:
            for tensor in tensors_of(each.value):
                if tensor.numel() > 1 and depends_on_batch(tensor):
                    self._left[each.source] = each
                    self._marked.append(tensor)
                    set_sources(tensor, {each.source})
                    storage = storage_of(tensor)
                    if storage is not None:
                        self.by_storage[storage] = frozenset({each.source})

    def __bool__(self) -> bool:
        return bool(self._left)

    def made_anew(self, left: list[Left]) -> list[Tensor]:
        """The tensors in ``left``, after the second run, that were not left by the first."""
        old = set(map(id, self._marked))
        return [tensor for each in left for tensor in tensors_of(each.value) if id(tensor) not in old]

    def used_by(self, record: StepRecord) -> tuple[CarriedState, ...]:
        """What the second run used of it, with the lines."""
        lines: dict[str, str] = {}
        for reads in (*(call.reads for call in record.calls), record.tail):
            lines = {**reads.parameters, **lines}
        return tuple(
            CarriedState(each.module, each.attribute, lines[each.source.name])
            for each in self._left.values()
            if each.source.name in lines
        )
