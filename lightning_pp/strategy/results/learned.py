"""Results of checks of first batches: how a step's numbers and lists of microbatches make those of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pp.split.fakes.parameters import is_fake


def is_number(value: object) -> bool:
    """Whether ``value`` is a number of Python or NumPy, or a tensor that holds one without a dimension."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype is not torch.bool and not is_fake(value)
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


class Learned:
    """Known kinds of the values that a module's steps leave, by their place in Python's notation.

    Attributes:
        unknown: Numbers of the batch that may have been merged wrongly: before it, and after it.
    """

    def __init__(self) -> None:
        self._adds_up: dict[str, bool] = {}
        self._is_by_sample: dict[str, bool] = {}
        self._asked: dict[str, tuple[Sequence[Any], Sequence[float]]] | None = None
        self._warned: set[str] = set()
        self.unknown: dict[str, tuple[Any, Any]] = {}

    def learn(self, merges: Sequence[Callable[[], object]]) -> None:
        """Notes which numbers add up: in one piece they are nearer to the sum of the parts' than to their mean.

        Args:
            merges: Two that merge the same samples, in one piece and as microbatches, and ask which numbers add up.
        """
        asked: list[dict[str, tuple[Sequence[Any], Sequence[float]]]] = []
        for merge in merges:
            self._asked = {}
            merge()
            asked.append(self._asked)
        self._asked = None
        for place in asked[0].keys() & asked[1].keys():
            [whole], [parts, weights] = asked[0][place][0], asked[1][place]
            expected, *added = (torch.as_tensor(each).cpu().to(torch.complex128) for each in (whole, *parts))
            weighted = [each * (weight / sum(weights)) for each, weight in zip(added, weights, strict=True)]
            from_sum, from_mean = (float((sum(each) - expected).abs().sum()) for each in (added, weighted))
            if from_sum != from_mean:  # else nothing was added, which shows nothing
                self._adds_up[place] = self._adds_up.get(place, True) and from_sum < from_mean

    def adds_up(self, place: str, added: Sequence[Any], weights: Sequence[float]) -> bool | None:
        """Whether the number at ``place`` adds up over microbatches; None: not known.

        A new key of a dict goes as the others if these add up. Microbatches of ``weights`` have ``added`` to it.
        """
        if self._asked is not None:
            self._asked[place] = added, weights
        return self._adds_up.get(place, True if self._siblings(place) == {True} else None)

    def note_unknown(self, place: str, before: Any, value: Any) -> None:
        """Notes that each microbatch has taken the number at ``place`` to ``value``, which no check has seen."""
        if before != value and not self._siblings(place):
            self.unknown[place] = before, value

    def warn_of_unknown(self) -> None:
        """Warns of what is noted, once for each place."""
        for place, (before, value) in self.unknown.items():
            if place not in self._warned:
                self._warned.add(place)
                warnings.warn(
                    f"Each microbatch took {place!r} from {before} to {value}; in the batches that were checked it did "
                    f"not change. It is {value} after this batch. That is right for a value that is set, and for a "
                    "count of batches. It is wrong for a count of samples: use a torchmetrics.SumMetric.",
                    stacklevel=2,
                )

    def _siblings(self, place: str) -> set[bool]:
        """What is known of the other entries of the container of ``place``."""
        container = place.rpartition("[")[0]
        return {adds for name, adds in self._adds_up.items() if container and name.startswith(container + "[")}

    def is_by_sample(self, place: str, lists: Sequence[Any], num_samples: Sequence[int]) -> bool | None:
        """Whether ``lists`` of microbatches have an entry for each sample; None: not known, with one sample each."""
        is_equal = list(map(len, lists)) == list(num_samples)
        if max(num_samples) > 1:
            self._is_by_sample[place] = self._is_by_sample.get(place, True) and is_equal
        return is_equal and self._is_by_sample.get(place)
