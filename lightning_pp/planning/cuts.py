"""Where the model is cut: the user's wishes, measured or estimated costs of units, and the predicted time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.memory.limit import Cut, DeviceMemory
from lightning_pp.planning.schedules.given_costs import GivenCosts
from lightning_pp.schedule import Placement, Schedule, StageCosts
from lightning_pp.schedule.simulation.simulate import LongestSpans
from lightning_pp.split.cut.moved_cuts import Places, RowOfUnits, StageTimes, in_batches
from lightning_pp.split.cut.partition import Partition, UnitMemory, partition_units
from lightning_pp.split.cut.unit_costs import UnitCost, calibrated, estimate_unit_costs, stage_costs, weighted
from lightning_pp.split.head.choice import SplitHead, check_split_head
from lightning_pp.split.record.step_record import StepRecord

_MOST_MOVES_TRIED = 400
_MOVES_AT_ONCE = 128
# a shorter step by less than this is within what costs are known to
_WORTH_A_MOVE = 0.999


@dataclass(frozen=True)
class CutOptions:
    """The user's options for cuts.

    Attributes:
        split_points: Names of the units that start stages 1, 2, ..., or None to balance.
        unit_weights: Name or shell pattern of units to a factor for their cost.
        rank_speeds: For each rank of the pipeline how fast it is, compared with the others; None: all alike.
        units: Names or shell patterns of what the user calls units, or None to discover them.
        split_head: In how many parts to cut a last projection with a cross entropy after it.
        flops_per_byte: FLOPs that the device does in the time in which its memory moves a byte, which is not a wish of
            the user's but what estimates use; 0 where that is not known.

    Raises:
        ConfigurationError: ``split_head`` is not of its kind.
    """

    split_points: Sequence[str] | None = None
    unit_weights: Mapping[str, float] | None = None
    rank_speeds: Sequence[float] | None = None
    units: Sequence[str] | None = None
    split_head: SplitHead = False
    flops_per_byte: float = 0.0

    def __post_init__(self) -> None:
        check_split_head(self.split_head)

    def speeds_of_stages(self, placement: Placement) -> list[float]:
        """The speed of each stage's rank."""
        if self.rank_speeds is None:
            return [1.0] * placement.num_stages
        return [self.rank_speeds[rank] for rank in placement.rank_of_stage]


def names_of(names: Sequence[str] | str | None) -> Sequence[str] | None:
    """Several names, where one may be given by itself."""
    return [names] if isinstance(names, str) else names


def measured_unit_costs(
    record: StepRecord, num_parameters: Mapping[str, int], measured: GivenCosts | None, cut: CutOptions
) -> dict[str, UnitCost] | None:
    """Milliseconds of units on a rank of speed 1, from given costs of stages, if these say which units the stages had.

    Returns:
        None without given costs, or if they are of unknown or other units.
    """
    if measured is None or measured.units is None or measured.stages.num_stages not in (None, len(measured.units)):
        return None
    try:
        estimated = estimate_unit_costs(record, num_parameters, cut.flops_per_byte)
        units = calibrated(estimated, measured.stages, measured.units)
    except ConfigurationError:
        return None
    if cut.rank_speeds is None or measured.ranks is None:
        return units
    for rank, members in zip(measured.ranks, measured.units, strict=False):
        if rank < len(cut.rank_speeds):
            speed = cut.rank_speeds[rank]
            units.update({unit: units[unit].scaled(speed) for unit in members if unit in units})
    return units


def best_partition(
    record: StepRecord,
    num_parameters: Mapping[str, int],
    placement: Placement,
    cut: CutOptions,
    *,
    costs: Mapping[str, UnitCost] | None,
    program: Schedule,
    memory: DeviceMemory | None = None,
    held_by: Sequence[Schedule | None] | None = None,
) -> Partition:
    """The cut with the shortest step that is found: the balanced one, then one cut after the other moved.

    A balanced cut makes the slowest rank as fast as it can be. Where ranks have several stages, the cut whose stages
    are most alike is tried as well. A step also takes the way of its first and its last microbatch, and who waits for
    whom; so cuts are moved by one unit at a time as long as ``program``, simulated with these costs, gets shorter.

    Args:
        record: A dry run of the step.
        num_parameters: Every unit's number of parameters.
        placement: Which rank holds which stages.
        cut: The user's wishes.
        costs: Measured costs of units; None for estimates.
        program: A schedule on this placement.
        memory: What ranks may hold; None for no limit.
        held_by: Schedules to keep it by, tried in order; None: one microbatch at a time. By default ``program``.

    Raises:
        ConfigurationError, SplitError: As :func:`partition_units` says; nothing fits the memory.
    """
    costs = costs or estimate_unit_costs(record, num_parameters, cut.flops_per_byte)
    unit_costs = weighted(costs, cut.unit_weights or {})

    def balanced(units: UnitMemory | None, even_stages: bool = False) -> Partition:
        return partition_units(
            record,
            placement=placement,
            num_parameters=num_parameters,
            split_points=cut.split_points,
            costs=unit_costs,
            rank_speeds=cut.rank_speeds,
            memory=units,
            even_stages=even_stages,
        )

    orders = held_by or (program,)
    if cut.split_points is not None or placement.num_ranks == 1:
        partition = balanced(None)
        if memory is not None:
            memory.check(partition, placement, orders[-1])
        return partition
    partition, order = (balanced(None), None) if memory is None else _fitting(memory, balanced, placement, orders)

    def fits(moved: Partition) -> bool:
        return memory is None or memory.fits(moved, placement, order)

    tries_even = placement.num_stages > placement.num_ranks
    starts = [partition, *filter(fits, [balanced(None, even_stages=True)] if tries_even else [])]
    steps = _Steps(program, record, partition.unit_costs, cut.speeds_of_stages(placement))
    return min((_moved(steps, start, fits) for start in starts), key=lambda found: found[0])[1]


def _fitting(
    memory: DeviceMemory, balanced: Cut, placement: Placement, orders: Sequence[Schedule | None]
) -> tuple[Partition, Schedule | None]:
    """A cut that keeps the limit, and the first of ``orders`` by which there is one."""
    for order in orders[:-1]:
        try:
            return memory.fitting_partition(balanced, placement, order), order
        except ConfigurationError:
            continue
    return memory.fitting_partition(balanced, placement, orders[-1]), orders[-1]


def _moved(steps: _Steps, partition: Partition, fits: Callable[[Partition], bool]) -> tuple[float, Partition]:
    """Moves cuts by one unit at a time as long as that makes a step shorter; its time, and the cuts."""
    row, places = steps.row, steps.row.places(partition)
    best, tried = steps.time(places), 0
    while tried < _MOST_MOVES_TRIED:
        for number, candidate, time in steps.shorter(row.moved(places), best):
            moved = row.partition(candidate, partition)
            if fits(moved):
                partition, places, best, tried = moved, candidate, time, tried + number
                break
        else:
            break
    return best, partition


class _Steps:
    """The time of a step, for many cuts at once, by the costs of units alone, in their unit: messages take none.

    Args:
        program: The schedule of the step.
        record: The step, which has the row of units.
        costs: Of units.
        speeds: Of each stage's rank.
    """

    def __init__(
        self, program: Schedule, record: StepRecord, costs: Mapping[str, UnitCost], speeds: Sequence[float]
    ) -> None:
        self.row = RowOfUnits(record)
        self._spans, self._stages = LongestSpans(program), StageTimes(self.row, costs, speeds)
        self._num_microbatches, placement = program.num_microbatches, program.placement
        self._stages_of_ranks = [list(placement.stages_of_rank(rank)) for rank in range(placement.num_ranks)]

    def time(self, places: Places) -> float:
        """Of one cut."""
        return float(self._spans.of(self._stages.of(places[None]))[0])

    def shorter(self, candidates: Iterable[Places], best: float) -> Iterator[tuple[int, Places, float]]:
        """Those by which the step gets shorter than ``best`` by what is worth a move, in their order.

        Yields:
            How many were looked at up to this one, its places, and the time of its step.
        """
        number = 0
        for batch in in_batches(candidates, min(_MOVES_AT_ONCE, self._spans.most_at_once)):
            times = self._stages.of(batch)
            # no step is shorter than the work of the rank that has most of it: spares the simulation of many
            work = times.sum(axis=0)
            most = np.max([work[:, stages].sum(axis=1) for stages in self._stages_of_ranks], axis=0)
            simulated = np.flatnonzero(self._num_microbatches * most < best)
            spans = self._spans.of(times[:, simulated])
            for index, time in zip(simulated.tolist(), spans.tolist(), strict=True):
                if time < best * _WORTH_A_MOVE:
                    yield number + index + 1, batch[index], time
            number += len(batch)


def costs_of_other_cuts(measured: StageCosts, partition: Partition, speeds: Sequence[float]) -> StageCosts:
    """Costs of the stages of ``partition``, cut by measured costs of units; messages as they were on average."""
    number = measured.num_stages or 1
    resolved = measured.per_stage(number)
    costs = stage_costs(partition.unit_costs, partition.stage_of_unit, speeds)
    messages = resolved.p2p[:-1] + resolved.p2p_back[1:]
    return replace(
        costs,
        p2p=sum(messages) / max(len(messages), 1),
        gather=sum(resolved.gather) / number,
        reduce=sum(resolved.reduce) / number,
    )
