"""What the microbatches of one batch count, added up over the batch and its replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_pp.split.record.reduction import Kind, Place
from lightning_pp.split.reductions.facts import Facts
from lightning_pp.split.reductions.functions import GREATEST
from lightning_pp.split.reductions.scaling import Count

K = TypeVar("K")
Counts = Mapping[Place, Count]


def total_of(counts: Sequence[Counts], facts: Facts) -> dict[Place, Count]:
    """What a batch counts, from what its parts do; a place that not all parts came to counts where it was come to."""
    totals: dict[Place, Count] = {}
    for place in dict.fromkeys(place for part in counts for place in part):
        fact = facts.find(place)
        values = [part[place] for part in counts if place in part]
        known = [value for value in values if value is not None]
        if fact is None or len(known) < len(values):
            totals[place] = None
        elif fact.kind is Kind.EXTREME:
            totals[place] = (_extreme([value[0] for value in known], place.site.function in GREATEST),)
        else:
            totals[place] = tuple(sum(parts) for parts in zip(*known, strict=True))
    return totals


def are_equal(some: Counts, others: Counts) -> bool:
    """Whether two totals are the same."""
    return some.keys() == others.keys() and all(_equal(count, others[place]) for place, count in some.items())


def need_no_correction(counts: Sequence[Counts], totals: Counts, shares: Sequence[float], facts: Facts) -> bool:
    """Whether each microbatch counts just its share of the total, so that nothing is to be corrected.

    False where looking would wait for an accelerator.
    """
    for count, share in zip(counts, shares, strict=True):
        for place, total in totals.items():
            fact, part = facts.find(place), count.get(place)
            if fact is None or total is None or part is None:
                return False
            factor = 1.0 if fact.kind is Kind.EXTREME else share
            if not all(_is_share(mine, whole, factor) for mine, whole in zip(part, total, strict=True)):
                return False
    return True


def _is_share(part: Tensor | float, whole: Tensor | float, share: float) -> bool:
    mine, all_of_it = torch.as_tensor(part), torch.as_tensor(whole)
    return mine.is_cpu and all_of_it.is_cpu and torch.equal(all_of_it.double() * share, mine.double())


def mapped(counts: Mapping[K, Count], function: Callable[[Any], Any]) -> dict[K, Count]:
    """``counts`` with ``function`` of each part."""
    return {place: None if count is None else tuple(map(function, count)) for place, count in counts.items()}


def _extreme(values: Sequence[Tensor | float], is_greatest: bool) -> Tensor:
    found = torch.as_tensor(values[0])
    for value in values[1:]:
        other = torch.as_tensor(value)
        if found.dtype == torch.bool:
            found = found | other if is_greatest else found & other
        else:
            found = torch.maximum(found, other) if is_greatest else torch.minimum(found, other)
    return found


def _equal(count: Count, other: Count) -> bool:
    if count is None or other is None:
        return count is other
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(count, other, strict=True))
