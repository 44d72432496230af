"""Whether a value that was made of a batch's samples adds up over microbatches.

A sum or a mean over the samples of a microbatch is an *estimate*: the weighted mean of the microbatches' is the whole
batch's. So is whatever is made of estimates by adding them and by multiplying with what the batch alone decides. The
root of an estimate is not, nor the product of two, nor an estimate times something of another sample. Such a value is
*bent*, and a loss that is bent is another one for microbatches than for the batch, if only by a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split.data.tree import tensors_of
from lightning_pp.split.record.reduction import Kind
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.reductions.functions import REVERSED

_ESTIMATE = "_pp_estimate"


@dataclass(frozen=True)
class Estimate:
    """What a tensor is that was made of the samples of a microbatch.

    Attributes:
        bent_by: The function that has bent it; None: it adds up.
        is_product: Whether that is a product, as in the auxiliary losses of mixtures of experts.
        line: The user's line that calls it.
    """

    bent_by: str | None = None
    is_product: bool = False
    line: str = ""


def estimate_of(value: Any) -> Estimate | None:
    """What ``value`` is as an estimate; None: it is none."""
    return getattr(value, _ESTIMATE, None) if isinstance(value, Tensor) else None


def marked_as(tensor: Tensor, other: Tensor) -> Tensor:
    """``other``, which is an estimate if ``tensor`` is one."""
    if hasattr(tensor, _ESTIMATE):
        setattr(other, _ESTIMATE, estimate_of(tensor))
    return other


def follow(
    kind: Kind | None, function: Any, given: Sequence[Tensor], of_samples: Sequence[bool], result: Any, *, reduces: bool
) -> None:
    """Marks ``result`` by what it was made of.

    Args:
        kind: What the function does.
        function: The function.
        given: The tensors that it was given.
        of_samples: Which of them were made of samples by weights; empty where that does not matter.
        result: What it gave.
        reduces: Whether it has reduced over samples what depends on weights.
    """
    estimates = [estimate for estimate in map(estimate_of, given) if estimate is not None]
    if not estimates and not reduces:
        return
    bent = next((estimate for estimate in estimates if estimate.bent_by is not None), None)
    if bent is None:
        bends = bool(estimates) and _bends(kind, function, given, of_samples, result)
        bends = bends or (reduces and kind is Kind.EXTREME)
        is_product = kind in (Kind.PRODUCT, Kind.CONTRACTION)
        bent = Estimate(function.__name__, is_product, user_line()) if bends else Estimate()
    for tensor in tensors_of(result):
        if tensor.is_floating_point():
            setattr(tensor, _ESTIMATE, bent)


def _bends(kind: Kind | None, function: Any, given: Sequence[Tensor], of_samples: Sequence[bool], result: Any) -> bool:
    """Whether the function does more to an estimate than add to it or multiply it with what no sample decides."""
    if kind in (Kind.LINEAR, Kind.ADDITION, Kind.SUM, Kind.MEAN, Kind.NUMBER):
        return False
    if kind in (Kind.PRODUCT, Kind.CONTRACTION):
        return sum(of_samples) > 1
    if kind is Kind.QUOTIENT:
        divisors = of_samples[:1] if function.__name__ in REVERSED else of_samples[1:]
        return any(divisors)
    # a guard that does not act (a clamp, nan_to_num) returns what it was given
    return not any(
        isinstance(result, Tensor) and value.shape == result.shape and torch.equal(value.detach(), result.detach())
        for value in given
        if estimate_of(value) is not None
    )
