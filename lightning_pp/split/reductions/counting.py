"""What the microbatches of one batch count, added up over the batch and its replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_pp.split.record.reduction import Kind, Place
from lightning_pp.split.reductions.facts import Facts
from lightning_pp.split.reductions.functions import GREATEST
from lightning_pp.split.reductions.scaling import Count

K = TypeVar("K")
Counts = Mapping[Place, Count]


def total_of(counts: Sequence[Counts], facts: Facts) -> dict[Place, Count]:
    """What a batch counts, from what its parts count; a place that some parts did not reach counts in the others."""
    totals: dict[Place, Count] = {}
    for place in dict.fromkeys(place for part in counts for place in part):
        fact = facts.find(place)
        values = [part[place] for part in counts if place in part]
        known = [value for value in values if value is not None]
        if fact is None or len(known) < len(values):
            totals[place] = None
        elif fact.call.kind is Kind.EXTREME:
            totals[place] = (_extreme([value[0] for value in known], place.site.function in GREATEST),)
        else:
            totals[place] = tuple(sum(parts) for parts in zip(*known, strict=True))
    return totals


def are_equal(some: Mapping[K, Count], others: Mapping[K, Count]) -> bool:
    """Whether two totals are the same, bit by bit; an accelerator is waited for once."""
    if some.keys() != others.keys() or any((some[place] is None) != (others[place] is None) for place in some):
        return False
    pairs = [pair for place in some for pair in zip(some[place] or (), others[place] or (), strict=True)]
    if any(_form(a) != _form(b) for a, b in pairs):
        return False
    left = _bytes_of(a for a, _ in pairs if isinstance(a, Tensor))
    right = _bytes_of(b for _, b in pairs if isinstance(b, Tensor))
    return all(torch.equal(content, right[device]) for device, content in left.items())


def on_host(counts: Mapping[K, Count]) -> dict[K, Count]:
    """``counts`` with tensors of the host, copied from an accelerator together, in one wait."""
    tensors = [part for count in counts.values() for part in count or () if isinstance(part, Tensor)]
    left = {device: content.cpu() for device, content in _bytes_of(tensors).items()}

    def copied(part: Tensor | float) -> Tensor | float:
        if not isinstance(part, Tensor):
            return part
        size = part.numel() * part.element_size()
        content, left[part.device] = left[part.device].tensor_split([size])
        return content.clone().view(part.dtype).view(part.shape)  # a clone, for the address has to suit the dtype

    return {place: None if count is None else tuple(map(copied, count)) for place, count in counts.items()}


def need_no_correction(counts: Sequence[Counts], totals: Counts, shares: Sequence[float], facts: Facts) -> bool:
    """Whether each microbatch counts just its share of the total, so that nothing is to be corrected.

    False where looking would wait for an accelerator.
    """
    for count, share in zip(counts, shares, strict=True):
        for place, total in totals.items():
            fact, part = facts.find(place), count.get(place)
            if fact is None or total is None or part is None:
                return False
            factor = 1.0 if fact.call.kind is Kind.EXTREME else share
            for mine, whole in zip(map(torch.as_tensor, part), map(torch.as_tensor, total), strict=True):
                if not (mine.is_cpu and whole.is_cpu and torch.equal(whole.double() * factor, mine.double())):
                    return False
    return True


def _extreme(values: Sequence[Tensor | float], is_greatest: bool) -> Tensor:
    found = torch.as_tensor(values[0])
    for value in values[1:]:
        other = torch.as_tensor(value)
        if found.dtype == torch.bool:
            found = found | other if is_greatest else found & other
        else:
            found = torch.maximum(found, other) if is_greatest else torch.minimum(found, other)
    return found


def _form(part: Tensor | float) -> object:
    """What has to be equal before bytes are compared: a number itself, or what a tensor is."""
    return (part.dtype, part.shape, part.device) if isinstance(part, Tensor) else part


def _bytes_of(tensors: Iterable[Tensor]) -> dict[torch.device, Tensor]:
    """On each device, the bytes of all its tensors, one after the other."""
    parts: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.device, []).append(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return {device: torch.cat(those) for device, those in parts.items()}
