"""The same random numbers for a part of a batch as for the whole, so that runs on both can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split._torch_private import OperationsMode, schema_of, tree_leaves
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.side_effects.generators import is_seeded_here, torch_generators
from lightning_pp.split.unit_calls.interception import running_unit

Stretch = int | str | None
"""What draws: the units of a stage, or the code outside units, whose draws are equal on all stages."""
_PERMUTATION = "aten::randperm"


class Draws:
    """The random numbers that the step drew on the whole batch, in order.

    Attributes:
        differ: Whether something was drawn that has no rows to share out, such as places in the batch.
        repeated: The user's line that draws the same numbers for each part of a batch; empty for none.
        permuted: By the user's line, of how many things code outside of units draws a permutation.
    """

    def __init__(self) -> None:
        self._drawn: dict[Stretch, list[Tensor]] = {}
        self._states: dict[tuple[Stretch, int], Tensor] = {}
        self.differ = False
        self.repeated = ""
        self.permuted: dict[str, int] = {}

    def around(
        self, stage: int | None, part: tuple[float, float] | None = None, *, is_end: bool = False
    ) -> OperationsMode:
        """Around the step on one stage: records the draws for the whole, or returns a part's rows of them.

        Args:
            stage: The stage; None for a rehearsal, which runs no unit.
            part: Where the part begins and how long it is, as shares of the whole; None for the whole.
            is_end: Whether it is the run for the end of the batch, on all of it.
        """
        return _Drawing(self, stage, (0.0, 1.0) if part is not None and is_end else part, is_end)

    def note(self, stretch: Stretch, tensor: Tensor) -> None:
        """The whole has drawn ``tensor``."""
        self._drawn.setdefault(stretch, []).append(tensor.detach().clone())

    def note_repeated(
        self, stretch: Stretch, index: int, tensor: Tensor, generator: torch.Generator | None, state: Tensor | None
    ) -> None:
        """Finds out whether a part has drawn what every part draws, where the whole has drawn more.

        Args:
            stretch: What draws.
            index: Number of the tensor.
            tensor: What the part has drawn.
            generator: What it is drawn from; None for the default generator.
            state: Of ``generator``, before the draw.
        """
        drawn, device = self._drawn.get(stretch, []), tensor.device
        if index >= len(drawn) or drawn[index].shape == tensor.shape:
            return
        if generator is None or state is None:
            repeats = not all(
                is_seeded_here(each) for each in torch_generators(device) if each.device.type == device.type
            )
        else:
            before = self._states.setdefault((stretch, index), state)
            repeats = before is not state and torch.equal(before, state) and not is_seeded_here(generator)
        if repeats and not self.repeated:
            self.repeated = user_line()

    def share_out(self, stretch: Stretch, index: int, tensor: Tensor, part: tuple[float, float]) -> None:
        """Overwrites ``tensor``, the ``index``-th that a part has drawn, with its rows of what the whole drew."""
        drawn = self._drawn.get(stretch, [])
        source = _rows_of(drawn[index], tensor, part) if index < len(drawn) else None
        if source is None:
            self.differ = True
        else:
            tensor.copy_(source)


class _Drawing(OperationsMode):  # type: ignore[no-untyped-call]
    def __init__(self, draws: Draws, stage: int | None, part: tuple[float, float] | None, is_end: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._stage = stage
        self._part = part
        self._outside: Stretch = "end" if is_end else "outside"
        self._indices: dict[Stretch, int] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or not _drops_out(func, args, kwargs):
            return func(*args, **kwargs)
        generator: torch.Generator | None = kwargs.get("generator")
        state = None if generator is None else generator.get_state()
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and type(tensor) is Tensor:
                self._settle(func, tensor, generator, state)
        return result

    def _settle(self, func: Any, tensor: Tensor, generator: torch.Generator | None, state: Tensor | None) -> None:
        if schema_of(func).name == _PERMUTATION:  # no part can have its share of one, so nothing is mixed
            tensor.copy_(torch.arange(len(tensor), device=tensor.device))
            if self._part is None and not running_unit():
                self._draws.permuted[user_line()] = len(tensor)
            return
        stretch = self._stage if running_unit() else self._outside
        if self._part is None:
            self._draws.note(stretch, tensor)
            return
        index = self._indices.get(stretch, 0)
        self._indices[stretch] = index + 1
        if self._stage is not None:
            self._draws.note_repeated(stretch, index, tensor, generator, state)
        self._draws.share_out(stretch, index, tensor, self._part)


def _drops_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """False for attention without dropout: its operations are among those that draw, and it computes a value."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


def _rows_of(drawn: Tensor, tensor: Tensor, part: tuple[float, float]) -> Tensor | None:
    if drawn.shape == tensor.shape:
        return drawn
    if drawn.dim() != tensor.dim() or drawn.dtype != tensor.dtype:
        return None
    other = [dim for dim in range(drawn.dim()) if drawn.shape[dim] != tensor.shape[dim]]
    if len(other) != 1:
        return None
    length, (start, share) = drawn.shape[other[0]], part
    if round(length * share) != tensor.shape[other[0]]:
        return None
    return drawn.narrow(other[0], round(length * start), tensor.shape[other[0]])
