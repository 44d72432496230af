"""The parts of a head: units that share its weight, each with some of its classes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pp.split._torch_private import has_forward_hooks, parameters_of
from lightning_pp.split.head.cross_entropy import RunningSums, joined, sums_dtype, sums_of_part

# A tensor core multiplies tiles of this many rows without waste.
_ROWS_OF_A_TILE = 128

Pointwise = tuple[tuple[str, tuple[Any, ...]], ...]
"""Operations on every logit by itself: names of methods of a tensor, with their arguments, which are no tensors."""


class HeadPart(nn.Module):
    """Classes ``first`` to ``last - 1`` of a head, without parameters of its own: it uses rows of the head's."""

    def __init__(self, head: nn.Linear, head_name: str, first: int, last: int) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple, so that it is no child
        self.head_name = head_name
        self.first, self.last = first, last

    @property
    def name(self) -> str:
        """Its name as a unit."""
        return f"{self.head_name}[{self.first}:{self.last}]"

    @property
    def num_classes(self) -> int:
        """Classes of the whole head."""
        return self._head[0].out_features

    def forward(
        self,
        hidden: Tensor,
        target: Tensor,
        log_sum_exp: Tensor | None,
        at_target: Tensor | None,
        total: Tensor | None,
        pointwise: Pointwise,
        with_total: bool,
    ) -> tuple[Tensor, ...]:
        """The running sums after these classes.

        Args:
            hidden: What the head is given, [..., D] with N rows.
            target: The class of each row, int64, [N].
            log_sum_exp: As in :class:`RunningSums`, after the parts before; None in the first, as the next two.
            at_target: Likewise.
            total: Likewise.
            pointwise: What is done with the logits.
            with_total: Whether their total is needed.

        Returns:
            ``hidden`` for the next part, so that it goes from stage to stage, and the sums that are needed, [N] each.
        """
        head = self._head[0]
        bias = None if head.bias is None else head.bias[self.first : self.last]
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), head.weight[self.first : self.last], bias)
        sums = sums_of_part(applied(pointwise, logits), target, self.first, with_total=with_total)
        before = None
        if log_sum_exp is not None and at_target is not None:
            before = RunningSums(log_sum_exp, at_target, total)
        known = joined(before, sums)
        # another tensor, for what a unit returns as it was given counts as made before it
        return (hidden.view_as(hidden), *(tensor for tensor in known if tensor is not None))


def applied(pointwise: Pointwise, logits: Tensor) -> Tensor:
    """Logits with that done to each of them, for :func:`sums_of_part`."""
    # a cast to the dtype that sums are kept in anyway is left out: less is kept for backward so
    if pointwise != (("to", (sums_dtype(logits.dtype),)),):
        for name, arguments in pointwise:
            logits = getattr(logits, name)(*arguments)
    return logits


def is_head(unit: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether ``unit`` is torch's linear layer, which parts can replace."""
    return (
        type(unit) is nn.Linear
        and parameters_of(unit).get("weight") is not None
        and not has_forward_hooks(unit)
        and "forward" not in unit.__dict__
    )


def with_parts(units: Mapping[str, nn.Module], head_name: str, num_parts: int) -> dict[str, nn.Module]:
    """``units`` with the parts of a head before it; the head itself is for steps that use its logits otherwise.

    There are fewer than ``num_parts`` if there are not so many classes.
    """
    head = units[head_name]
    assert isinstance(head, nn.Linear)
    found: dict[str, nn.Module] = {}
    for name, unit in units.items():
        if name == head_name:
            found |= {part.name: part for part in _parts(head, head_name, num_parts)}
        found[name] = unit
    return found


def parts_in(units: Mapping[str, nn.Module]) -> dict[str, tuple[HeadPart, ...]]:
    """The name of each head among ``units`` that has parts there, with these in order."""
    found: dict[str, tuple[HeadPart, ...]] = {}
    for unit in units.values():
        if isinstance(unit, HeadPart):
            found[unit.head_name] = (*found.get(unit.head_name, ()), unit)
    return found


def whole_units(units: Mapping[str, nn.Module], names: Iterable[str]) -> set[str]:
    """``names`` of units, with the head's name instead of those of its parts."""
    return {unit.head_name if isinstance(unit := units[name], HeadPart) else name for name in names}


def _parts(head: nn.Linear, head_name: str, num_parts: int) -> list[HeadPart]:
    num_classes = head.out_features
    tile = _ROWS_OF_A_TILE if num_classes >= 2 * num_parts * _ROWS_OF_A_TILE else 1
    bounds = [round(number * num_classes / num_parts / tile) * tile for number in range(num_parts)] + [num_classes]
    bounds = sorted(set(bounds))
    return [HeadPart(head, head_name, *pair) for pair in itertools.pairwise(bounds)]
