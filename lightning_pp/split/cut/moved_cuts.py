"""Cuts that are moved a little, as arrays of places, and the times of their stages.

A row of n groups of units, none of which is cut, in the order of their first calls; a cut is the place of the first
group after it, 1 to n - 1, and S stages have S - 1 cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_pp.split.cut.partition import Partition, inseparable_groups
from lightning_pp.split.cut.unit_costs import UnitCost
from lightning_pp.split.record.step_record import StepRecord

Places: TypeAlias = npt.NDArray[np.int64]
Times: TypeAlias = npt.NDArray[np.float64]


class RowOfUnits:
    """The units that a recorded step calls, in a row.

    Attributes:
        groups: Units that share a stage, in order.
    """

    def __init__(self, record: StepRecord) -> None:
        self.groups = inseparable_groups(record)

    def places(self, partition: Partition) -> Places:
        """Where ``partition`` cuts. Shape (S - 1)."""
        stages = np.array([partition.stage_of_unit[group[0]] for group in self.groups])
        return np.flatnonzero(np.diff(stages)) + 1

    def partition(self, places: Places, like: Partition) -> Partition:
        """``like`` with its cuts at ``places``; units that the step does not call stay where they are."""
        stages = np.searchsorted(places, np.arange(len(self.groups)), side="right").tolist()
        moved = {unit: stage for stage, group in zip(stages, self.groups, strict=True) for unit in group}
        return Partition(like.num_stages, {**like.stage_of_unit, **moved}, like.unit_costs)

    def moved(self, places: Places) -> Iterator[Places]:
        """All cuts with one or more neighbouring ``places`` moved one place up, or all down.

        As arrays of shape (several, S - 1), beginning with moves of few cuts; each stage keeps a group.
        """
        number = len(places)
        for length in range(1, number + 1):
            first = np.arange(number - length + 1)[:, None]
            is_moved = (np.arange(number) >= first) & (np.arange(number) < first + length)
            moved = (places + np.array([-1, 1])[:, None] * is_moved[:, None]).reshape(-1, number)
            yield moved[(np.diff(self.bounds(moved)) > 0).all(axis=1)]

    def bounds(self, places: Places) -> Places:
        """Where stages begin and, one further, end: (several, S - 1) to (several, S + 1)."""
        return np.pad(places, ((0, 0), (1, 1)), constant_values=((0, 0), (0, len(self.groups))))


class StageTimes:
    """The times of stages for any cuts: the sums of their units.

    Args:
        row: The units.
        costs: Unit name to cost.
        speeds: Of each stage's rank. Length S.
    """

    def __init__(self, row: RowOfUnits, costs: Mapping[str, UnitCost], speeds: Sequence[float]) -> None:
        self._row = row
        self._speeds = np.array(speeds)
        units = [[costs[unit] for unit in group] for group in row.groups]
        times = [[(cost.forward, cost.backward_input, cost.backward_weight) for cost in group] for group in units]
        of_groups = np.array([np.sum(group, axis=0) for group in times]).T
        self._before = np.pad(np.cumsum(of_groups, axis=1), ((0, 0), (1, 0)))  # of all groups before each, and of all

    def of(self, places: Places) -> Times:
        """F, I and W of each stage: cuts of shape (several, S - 1) to times of shape (3, several, S)."""
        bounds = self._row.bounds(places)
        return np.asarray((self._before[:, bounds[:, 1:]] - self._before[:, bounds[:, :-1]]) / self._speeds)


def in_batches(arrays: Iterable[Places], size: int) -> Iterator[Places]:
    """The rows of ``arrays``, in order, at least ``size`` at a time as long as there are so many."""
    left = iter(arrays)
    for batch in left:
        while len(batch) < size and (following := next(left, None)) is not None:
            batch = np.concatenate((batch, following))
        yield batch


def moved_partitions(record: StepRecord, partition: Partition) -> Iterator[Partition]:
    """The partitions with one or more neighbouring cuts moved one place up, or all down."""
    row = RowOfUnits(record)
    for moved in row.moved(row.places(partition)):
        yield from (row.partition(places, partition) for places in moved)
