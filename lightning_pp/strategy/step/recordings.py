"""Warns once if a run's steps are recorded again and again: how long it takes, and what in the batch changes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_pp.planning.steps.plans import StepPlanCache
from lightning_pp.split.data.tree import entries_of

_BATCHES, _MOST_RECORDINGS = 20, 3


class RecordingWatch:
    """Counts the recordings in the last batches.

    Args:
        plans: Where steps are recorded.
    """

    def __init__(self, plans: StepPlanCache) -> None:
        self._plans = plans
        # of each of the last batches when it began, and for each recording in it how long that took
        self._batches: deque[tuple[float, list[float]]] = deque(maxlen=_BATCHES)
        self._sizes: list[dict[str, Any]] = [{}, {}]  # of the two microbatches that were recorded last
        self._has_told = False

    def start_batch(self) -> None:
        """Another batch of the training begins."""
        self._batches.append((time.perf_counter(), []))

    @contextmanager
    def watching(self, step: str, data: Any) -> Iterator[None]:
        """Around looking up the plan of ``step`` for a microbatch, ``data``."""
        number, start = self._plans.num_recorded, time.perf_counter()
        yield
        is_known = self._plans.num_recorded == number
        if is_known or step != "training_step" or not self._batches or self._has_told:
            return
        now = time.perf_counter()
        self._batches[-1][1].append(now - start)
        leaves = [(place, leaf) for place, leaf in entries_of(data, "batch") if isinstance(leaf, (Tensor, int))]
        sizes = {at: f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else leaf for at, leaf in leaves}
        self._sizes = [self._sizes[-1], sizes]
        taken = [seconds for _, of_batch in self._batches for seconds in of_batch]
        if len(taken) > _MOST_RECORDINGS and len(self._batches) == _BATCHES:
            self._has_told = True
            rank_zero_info(
                f"In the last {_BATCHES} batches {step} was recorded {len(taken)} times. This took {sum(taken):.1f} s, "
                f"{sum(taken) / (now - self._batches[0][0]):.0%} of the time. Before the last recording "
                f"{self._changes()}. A step on other sizes is recorded again if the code between its units runs other "
                "operations (a loop over a size), or if a unit needs values or leaves tensors elsewhere than in its "
                "outputs. Pad batches to a few sizes, or move such code into a unit."
            )

    def _changes(self) -> str:
        before, now = self._sizes
        changes = [
            f"{place} went from {before[place]} to {size}"
            for place, size in now.items()
            if before.get(place, size) != size
        ]
        return ", ".join(changes[:3]) or "the batch kept its shapes, and other code ran on it"
