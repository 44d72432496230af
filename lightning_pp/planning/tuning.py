"""Chooses cuts, placement and the first program, before the model is cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_pp.errors import ConfigurationError, ScheduleError, SplitError
from lightning_pp.planning.cuts import CutOptions, best_partition, costs_of_other_cuts, measured_unit_costs
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.schedules.given_costs import GivenCosts
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.predictions import Prediction, step_time
from lightning_pp.planning.stage_costs import assumed_speed, estimated_costs
from lightning_pp.schedule import Placement, Schedule, StageCosts
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.cut.unit_costs import UnitCost
from lightning_pp.split.record.step_record import StepRecord

_log = logging.getLogger(__name__)

# More stages on a rank mean more messages and more actions than the estimate knows of.
_WORTH_MORE_STAGES = 0.98


@dataclass(frozen=True)
class Layout:
    """How a model is cut and where its parts are.

    Attributes:
        placement: Which rank holds which stages.
        partition: Which stage each unit is on.
        costs: Given or estimated costs of these stages; ``held_*`` in GiB.
        start: The schedule of the first batches, for as many microbatches as the first batch has.
        reason: Why, for the log; empty where there was nothing to choose.
        room_gib: What a limit of all memory leaves for activations on each rank; None without one.
        rejected: What was found on other placements, by the same costs.
        about_head: What cutting the head would do, a sentence; empty if it was not considered.
    """

    placement: Placement
    partition: Partition
    costs: StageCosts
    start: Schedule
    reason: str = ""
    room_gib: tuple[float, ...] | None = None
    rejected: tuple[Prediction, ...] = ()
    about_head: str = ""

    @cached_property
    def step_ms(self) -> float:
        """The planned time of a step."""
        return step_time(self.start, self.costs)


@dataclass(frozen=True)
class LayoutRequest:
    """The inputs for the choice of a layout.

    Attributes:
        options: What the user asks of the schedule.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of the first batch.
        cut: What the user says of the cuts.
        device_type: Of the device that computes, for estimates.
        memory: What a rank may hold altogether; None for no limit.
    """

    options: ScheduleOptions
    num_ranks: int
    num_microbatches: int
    cut: CutOptions
    device_type: str
    memory: DeviceMemory | None = None

    @property
    def fewest_stages(self) -> int:
        """Stages that there have to be units for."""
        return min(placement.num_stages for placement in self.placements)

    @cached_property
    def placements(self) -> list[Placement]:
        """Where the stages may be, as given costs of stages, not of units, or the user's cuts have it; else several."""
        costs, points, known = self.options.costs, self.cut.split_points, None
        if costs is not None and costs.units is None:
            known = 1 if costs.stages.num_stages is None else costs.stages.num_stages // self.num_ranks
        elif points is not None:
            known = max(1, (len(points) + 1) // self.num_ranks)
        return self.options.source.placements(self.num_ranks, known)


def best_layout(on: Callable[[Placement], Layout], request: LayoutRequest) -> Layout:
    """Chooses placement and first schedule: the shortest step of the layouts ``on`` the placements of ``request``.

    A schedule with a name or in a file says the placement, and the cuts balance FLOPs and parameters. For ``auto`` the
    search is run on every placement to try (one chunk, V, interleaved): with given costs in full, with estimated ones
    without the improvement, since real costs come after the first batches. More stages on a rank are taken only if they
    make a step 2 % shorter.

    Raises:
        ConfigurationError, SplitError: The step cannot be cut into so many stages.
        ScheduleError: No schedule keeps the memory limit; the message says the smallest that works.
    """
    found: list[Layout] = []
    failures: list[Exception] = []
    rejected: list[Prediction] = []
    for placement in request.placements:
        try:
            found.append(on(placement))
        except (ConfigurationError, SplitError, ScheduleError) as error:
            failures.append(error)
            rejected.append(Prediction.impossible(request.options.source.name, placement, error))
    if not found:
        limit = request.options.memory_limit_gib
        if limit is not None and isinstance(failures[0], ScheduleError):
            raise ScheduleError(f"memory_limit_gib={limit:g}: {failures[0]} (in GiB)")
        raise failures[0]
    best = found[0]
    for layout in found[1:]:
        worth = _WORTH_MORE_STAGES if layout.placement.num_stages > best.placement.num_stages else 1.0
        if layout.step_ms < worth * best.step_ms:
            best = layout
    if not request.options.source.is_searched:
        return best
    predictions = {id(layout): Prediction.of(layout.start.name, layout.start, layout.costs) for layout in found}
    others = [predictions[id(other)] for other in found if other is not best]
    reason = _reason(predictions[id(best)], list(predictions.values()), failures)
    return replace(best, reason=reason, rejected=(*others, *rejected))


def layout_of(
    record: StepRecord,
    cuts: tuple[Partition, Mapping[str, UnitCost] | None],
    request: LayoutRequest,
    placement: Placement,
) -> Layout:
    """The costs and the schedule of ``cuts``, which :func:`choose_cuts` has made."""
    options, (partition, units) = request.options, cuts
    costs = costs_of(record, partition, placement, request, units)
    room = None if request.memory is None else request.memory.room_gib(partition, placement)
    limit = options.memory_limit(costs, placement, room)
    start = options.source.program(placement, request.num_microbatches, costs, limit, quick=options.costs is None)
    return Layout(placement, partition, costs, start, room_gib=room)


def choose_cuts(
    record: StepRecord, num_parameters: Mapping[str, int], request: LayoutRequest, placement: Placement
) -> tuple[Partition, Mapping[str, UnitCost] | None]:
    """The cuts for one placement, and the measured costs of units that they were made by, in milliseconds, if any."""
    units = measured_unit_costs(record, num_parameters, request.options.costs, request.cut)
    source, number = request.options.source, request.num_microbatches
    partition = best_partition(
        record,
        num_parameters,
        placement,
        request.cut,
        costs=units,
        program=source.program_to_cut_by(placement, number),
        memory=request.memory,
        held_by=source.orders_to_hold_by(placement, number),
    )
    return partition, units


def costs_of(
    record: StepRecord,
    partition: Partition,
    placement: Placement,
    request: LayoutRequest,
    units: Mapping[str, UnitCost] | None,
) -> StageCosts:
    """The given costs, or estimates, of the stages of ``partition``; ``held_*`` in GiB."""
    options = request.options
    speeds = request.cut.speeds_of_stages(placement)
    estimated = estimated_costs(
        record,
        partition,
        placement,
        assumed_speed(request.device_type),
        speeds,
        whole_batch_loss=options.whole_batch_loss,
        offloads=options.activation_offload,
    )
    measured = options.costs
    if measured is None:
        return estimated
    costs, holds_gib = measured.stages, measured.hold_gib
    if units is not None and not _measured_on(measured, partition):
        costs, holds_gib = costs_of_other_cuts(costs, partition, speeds), False
    if measured.are_alone:
        costs = replace(costs, p2p=estimated.p2p, p2p_back=estimated.p2p_back)
    costs.per_stage(partition.num_stages)
    if units is None:
        _warn_other_cuts(measured, partition)
    costs = replace(costs, offload=estimated.offload, held_on_host=estimated.held_on_host)
    if holds_gib:
        return costs
    return replace(costs, held_after_forward=estimated.held_after_forward, held_after_input=estimated.held_after_input)


def _measured_on(measured: GivenCosts, partition: Partition) -> bool:
    """Whether the given costs were measured on these stages."""
    called = set(partition.unit_costs)
    stages = [partition.units_of_stage(stage) for stage in range(partition.num_stages)]
    return [[unit for unit in units if unit in called] for units in stages] == [
        [unit for unit in units if unit in called] for units in measured.units or []
    ]


def _warn_other_cuts(measured: GivenCosts, partition: Partition) -> None:
    """Costs of other stages are ignored without an error, since no result depends on them."""
    units_then = measured.units
    if units_then is None:
        return
    units_now = [partition.units_of_stage(stage) for stage in range(partition.num_stages)]
    different = [
        stage for stage, units in enumerate(units_now) if stage >= len(units_then) or units_then[stage] != units
    ]
    if different:
        _log.warning(
            f"{measured.origin[0].upper()}{measured.origin[1:]} were measured for other cuts: stage {different[0]} "
            f"had {_shortened(units_then[different[0]])} then, and has {_shortened(units_now[different[0]])} now. "
            "Leave costs out to measure again."
        )


def _shortened(units: Sequence[str]) -> str:
    return ", ".join(units) if len(units) <= 2 else f"{units[0]} to {units[-1]}"


def _reason(best: Prediction, found: Sequence[Prediction], failures: Sequence[Exception]) -> str:
    """What was compared."""
    lines = [
        f"{'> ' if one is best else '  '}{one.placement} ({one.num_stages} stages): "
        f"{one.step_ms:.4g} ms a step, bubble {one.bubble_fraction:.3f}"
        for one in found
    ]
    return "\n".join(lines + [f"  not possible: {error}" for error in failures])
