"""Auxiliary losses, such as those that balance a mixture of experts: products of means over a microbatch's samples.

A part of a batch is run with the auxiliary losses of the whole instead of its own. If its loss then adds up, it
depends on the cut by them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split.data.tree import map_leaves, tensors_of
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.record.reduction import Kind
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.reductions.functions import kind_of
from lightning_pp.split.reductions.recording import tensors_given
from lightning_pp.split.reductions.scaling import degree_of, set_degree

Call = tuple[str, str, list[Tensor], list[Tensor]]
"""Of a function: name, the user's line, tensors in its arguments, tensors that it returns."""
_OF_WHOLE = "_pp_auxiliary_loss_of_whole"
_BETWEEN_UNITS = "_pp_made_between_units"


class AuxiliaryLosses:
    """Runs the functions between units on a part of a batch, with auxiliary losses of the whole batch.

    An auxiliary loss is a floating-point value without rows that differs between the part and the whole, and that a
    unit returns, or that is a product of two such values which code between units makes.

    Args:
        whole: The calls of the same functions in the run on the whole.
        share: The part's share of the samples.

    Attributes:
        lines: The user's lines that have auxiliary losses.
        products: Which of the calls make them, as products.
        meets_rows: Whether values of samples depend on one, so that it is more than a part of the loss.
    """

    def __init__(self, whole: Sequence[Call], share: float = 1.0) -> None:
        self._whole = iter(whole)
        self._share = share
        self._place = -1
        self.lines: set[str] = set()
        self.products: set[int] = set()
        self.meets_rows = False

    def run(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Runs the function ``name``."""
        self._place += 1
        given = list(tensors_given(args, kwargs))
        called, _, to_whole, by_whole = next(self._whole, ("", "", [], []))
        if called != name or len(given) != len(to_whole):
            self._whole = iter(())  # another path
            return func(*args, **kwargs)
        pairs = zip(given, to_whole, strict=True)
        others = [(mine, other) for mine, other in pairs if _is_other(mine, other) and not self.holds(mine)]
        by_units = {id(mine): _as(mine, other.clone()) for mine, other in others if not hasattr(mine, _BETWEEN_UNITS)}
        if by_units:
            args, kwargs = map_leaves(lambda leaf: by_units.get(id(leaf), leaf), (args, kwargs))
        depends = self.holds(given)
        result = func(*args, **kwargs)
        is_product = kind_of(func) in (Kind.PRODUCT, Kind.CONTRACTION) and len(others) - len(by_units) > 1
        is_product = is_product and len(by_whole) == 1 and _is_other(result, by_whole[0])
        if is_product:
            degree = degree_of(result)
            result = set_degree(_as(result, by_whole[0] * self._share**degree), degree)
            self.products.add(self._place)
        if by_units or is_product:
            self.lines.add(user_line())
            depends = True
        for tensor, other in zip(tensors_of(result), by_whole, strict=False):
            setattr(tensor, _BETWEEN_UNITS, True)
            if depends:
                setattr(tensor, _OF_WHOLE, True)
                self.meets_rows |= tensor.shape != other.shape
        return result

    @staticmethod
    def holds(tree: Any) -> bool:
        """Whether a tensor in ``tree`` depends on an auxiliary loss of the whole."""
        return any(hasattr(tensor, _OF_WHOLE) for tensor in tensors_of(tree))


def _as(mine: Tensor, other: Tensor) -> Tensor:
    """``other`` with the marks of ``mine``, by which those know it who follow values between units."""
    vars(other).update(vars(mine))
    return other


def _is_other(mine: Any, other: Tensor) -> bool:
    """Whether ``mine`` is a floating-point value without rows, and another than that of the whole."""
    if not isinstance(mine, Tensor) or mine.shape != other.shape or mine.dtype != other.dtype:
        return False
    return mine.is_floating_point() and not (is_fake(mine) or is_fake(other)) and not torch.equal(mine, other)
