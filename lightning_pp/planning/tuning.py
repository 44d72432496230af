"""Which unit runs where, chosen before the model is cut: cuts, placement, and the program to begin with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lightning_pp.errors import ConfigurationError, ScheduleError, SplitError
from lightning_pp.planning.cuts import CutOptions, best_partition, costs_of_other_cuts, measured_unit_costs
from lightning_pp.planning.memory_limit import DeviceMemory
from lightning_pp.planning.schedule_options import ScheduleOptions
from lightning_pp.planning.stage_costs import assumed_speed, estimated_costs
from lightning_pp.schedule import Placement, Schedule, StageCosts, build_schedule
from lightning_pp.schedule.program.whole_batch import whole_backwards
from lightning_pp.schedule.registry import schedule_family
from lightning_pp.schedule.search.auto import check_exact_is_practical
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.cut.unit_costs import UnitCost
from lightning_pp.split.record.step_record import StepRecord

_log = logging.getLogger(__name__)

_STAGES_PER_RANK_TRIED = (1, 2)
# More stages on a rank mean more messages and more actions than the estimate knows of.
_WORTH_MORE_STAGES = 0.98

T = TypeVar("T")


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
    """

    placement: Placement
    partition: Partition
    costs: StageCosts
    start: Schedule
    reason: str = ""
    room_gib: tuple[float, ...] | None = None


@dataclass(frozen=True)
class LayoutRequest:
    """What a layout is chosen from.

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
        options = self.options
        if options.from_file is not None:
            return options.from_file.placement.num_stages
        return self.num_ranks * min(self.stages_per_rank_to_try)

    @property
    def placements_to_try(self) -> list[Placement]:
        """One for a schedule with a name or in a file, several where there is a choice."""
        options = self.options
        if options.from_file is not None:
            return [options.from_file.placement]
        if not options.searches:
            sizes: dict[str, Any] = {"num_ranks": self.num_ranks, "num_microbatches": 1}
            return [build_schedule(options.name, stages_per_rank=self.stages_per_rank_to_try[0], **sizes).placement]
        placements = []
        for stages_per_rank in self.stages_per_rank_to_try:
            if stages_per_rank == 2 and self.num_ranks > 1:
                placements.append(Placement.v_shaped(self.num_ranks))
            placements.append(Placement.interleaved(self.num_ranks, stages_per_rank))
        return placements

    @property
    def stages_per_rank_to_try(self) -> tuple[int, ...]:
        """Stages on each rank: one number for a schedule with a name, several where there is a choice."""
        options = self.options
        if options.stages_per_rank is not None:
            return (options.stages_per_rank,)
        if not options.searches:
            return (schedule_family(options.name).default_stages_per_rank,)
        if options.costs is not None and not isinstance(options.costs_measured_on.get("stages"), list):
            num_stages = options.costs.num_stages
            return (1 if num_stages is None else num_stages // self.num_ranks,)
        if self.cut.split_points is not None:
            return (max(1, (len(self.cut.split_points) + 1) // self.num_ranks),)
        return _STAGES_PER_RANK_TRIED if self.num_ranks > 1 else (1,)


def choose_layout(record: StepRecord, num_parameters: Mapping[str, int], request: LayoutRequest) -> Layout:
    """Chooses cuts, placement and first schedule.

    A schedule with a name or in a file says the placement, and the cuts balance FLOPs and parameters. For ``auto`` the
    search is run on every placement to try (one chunk, V, interleaved): with given costs in full, with estimated ones
    without the improvement, since real costs come after the first batches. The shortest predicted step wins, and more
    stages on a rank only if they make it 2 % shorter.

    Args:
        record: A dry run of the step on one microbatch.
        num_parameters: Every unit's number of parameters.
        request: What to choose from.

    Raises:
        ConfigurationError, SplitError: The step cannot be cut into so many stages.
        ScheduleError: No schedule keeps the memory limit; the message says the smallest that works.
    """
    found: list[Layout] = []
    failures: list[Exception] = []
    for placement in request.placements_to_try:
        try:
            found.append(_layout(record, num_parameters, request, placement))
        except (ConfigurationError, SplitError, ScheduleError) as error:
            failures.append(error)
    if not found:
        limit = request.options.memory_limit_gib
        if limit is not None and isinstance(failures[0], ScheduleError):
            raise ScheduleError(f"memory_limit_gib={limit:g}: {failures[0]} (in GiB)")
        raise failures[0]
    best = found[0]
    for layout in found[1:]:
        worth = _WORTH_MORE_STAGES if layout.placement.num_stages > best.placement.num_stages else 1.0
        if _step_ms(layout) < worth * _step_ms(best):
            best = layout
    return replace(best, reason=_reason(best, found, failures)) if request.options.searches else best


def _step_ms(layout: Layout) -> float:
    """The time of a step in a row of overlapping ones."""
    return max(layout.start.simulate(layout.costs).span_ms)


def _layout(
    record: StepRecord, num_parameters: Mapping[str, int], request: LayoutRequest, placement: Placement
) -> Layout:
    """The cuts, the costs and the schedule for one placement."""
    options, num_stages = request.options, placement.num_stages
    partition, units = choose_cuts(record, num_parameters, request, placement)
    costs = costs_of(record, partition, placement, request, units)
    room = None if request.memory is None else request.memory.room_gib(partition, placement)
    if options.from_file is not None:
        options.from_file.validate(costs=costs, memory_limit=options.memory_limit_gib)
        return Layout(placement, partition, costs, options.from_file, room_gib=room)
    if options.exact_search:
        check_exact_is_practical(num_stages, request.num_microbatches)
    schedule = build_schedule(
        options.name,
        num_ranks=request.num_ranks,
        num_microbatches=request.num_microbatches,
        stages_per_rank=num_stages // request.num_ranks,
        costs=costs,
        memory_limit=memory_limit_of(options, costs, placement, room),
        exact=options.exact_search and options.costs is not None,
        placement=placement,
        quick=options.costs is None,
        whole_batch_loss=options.whole_batch_loss,
    )
    return Layout(placement, partition, costs, schedule.validate(), room_gib=room)


def memory_limit_of(
    options: ScheduleOptions, costs: StageCosts, placement: Placement, room_gib: Sequence[float] | None = None
) -> float | tuple[float, ...] | None:
    """What microbatches may hold on each rank, GiB.

    ``auto`` without a limit gets the memory of ``zb_h2``, twice that of ``1f1b``: on every rank two microbatches of all
    its stages for each rank of the pipeline. More would hardly shorten a step, and hold whole batches; with
    ``whole_batch_loss`` whole batches are held in any case, and it gets no limit. It keeps to ``room_gib`` as well; for
    a schedule with a name the cuts have seen to that.
    """
    limit, num_ranks = options.memory_limit_gib, placement.num_ranks
    if not options.searches:
        return limit
    if limit is None and options.whole_batch_loss:
        return None if room_gib is None else tuple(room_gib)
    if limit is None:
        held = costs.per_stage(placement.num_stages).held_after_forward
        limits = [2 * num_ranks * sum(held[stage] for stage in placement.stages_of_rank(r)) for r in range(num_ranks)]
    elif room_gib is None:
        return limit
    else:
        limits = [limit] * num_ranks
    return tuple(limits) if room_gib is None else tuple(map(min, limits, room_gib))


def choose_cuts(
    record: StepRecord, num_parameters: Mapping[str, int], request: LayoutRequest, placement: Placement
) -> tuple[Partition, Mapping[str, UnitCost] | None]:
    """The cuts for one placement, and the measured costs of units that they were made by, in milliseconds, if any."""
    units = measured_unit_costs(record, num_parameters, request.options, request.cut)
    program = request.options.from_file or _usual_program(placement, request)
    partition = best_partition(
        record,
        num_parameters,
        placement,
        request.cut,
        costs=units,
        program=program,
        memory=request.memory,
        keeps_order=not request.options.searches or request.options.whole_batch_loss,
        held_by=_leanest_program(program, request.options),
    )
    return partition, units


def _usual_program(placement: Placement, request: LayoutRequest) -> Schedule:
    """The schedule with the name, or one made by hand on this placement where a search is to follow."""
    name = request.options.name
    if request.options.searches:
        usual = {"one chunk": "zb_h1", "V": "zb_v"}
        name = usual.get(placement.kind, "interleaved_zb")
    return build_schedule(
        name,
        num_ranks=placement.num_ranks,
        num_microbatches=request.num_microbatches,
        stages_per_rank=placement.num_stages // placement.num_ranks,
        whole_batch_loss=request.options.whole_batch_loss,
    )


def _leanest_program(usual: Schedule, options: ScheduleOptions) -> Schedule | None:
    """With ``whole_batch_loss``, the order that holds the least of what a search may find: every backward whole."""
    if not (options.searches and options.whole_batch_loss):
        return None
    programs = tuple(map(whole_backwards, usual.programs))
    return replace(usual, name=options.name, programs=programs)


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
    )
    given = options.costs
    if given is None:
        return estimated
    holds_gib = options.costs_hold_gib
    if units is not None and not _measured_on(options, partition):
        given, holds_gib = costs_of_other_cuts(given, partition, speeds), False
    given.per_stage(partition.num_stages)
    if units is None:
        _warn_of_other_cuts(options, partition)
    if holds_gib:
        return given
    return replace(given, held_after_forward=estimated.held_after_forward, held_after_input=estimated.held_after_input)


def _measured_on(options: ScheduleOptions, partition: Partition) -> bool:
    """Whether the given costs were measured on these stages."""
    called = set(partition.unit_costs)
    found = [partition.units_of_stage(stage) for stage in range(partition.num_stages)]
    measured = options.costs_measured_on.get("stages", [])
    return [[unit for unit in units if unit in called] for units in found] == [
        [unit for unit in units if unit in called] for units in measured
    ]


def _warn_of_other_cuts(options: ScheduleOptions, partition: Partition) -> None:
    """Costs of other stages are no error, since no result depends on them, but no help either."""
    measured = options.costs_measured_on.get("stages")
    if not isinstance(measured, list):
        return
    found = [partition.units_of_stage(stage) for stage in range(partition.num_stages)]
    different = [stage for stage, units in enumerate(found) if stage >= len(measured) or measured[stage] != units]
    if different:
        _log.warning(
            f"{options.costs_origin[0].upper()}{options.costs_origin[1:]} were measured on other cuts: stage "
            f"{different[0]} had {_shortened(measured[different[0]])} and has {_shortened(found[different[0]])}. "
            "Measure again by leaving costs out."
        )


def _shortened(units: Sequence[str]) -> str:
    return ", ".join(units) if len(units) <= 2 else f"{units[0]} to {units[-1]}"


def _reason(best: Layout, found: Sequence[Layout], failures: Sequence[Exception]) -> str:
    """What was compared."""
    lines = [
        f"{'> ' if layout is best else '  '}{layout.placement.kind} ({layout.placement.num_stages} stages): "
        f"{_step_ms(layout):.4g} ms a step, bubble {layout.start.simulate(layout.costs).bubble_fraction:.3f}"
        for layout in found
    ]
    return "\n".join(lines + [f"  not possible: {error}" for error in failures])


def decided_by_one(compute: Callable[[], T], *, decides: bool, agree: Callable[[Any], Any]) -> T:
    """What ``compute`` returns or raises on the rank that decides, on every rank.

    Args:
        compute: Called on that rank only.
        decides: Whether this is the rank, global rank 0.
        agree: Returns rank 0's argument on every rank.
    """
    outcome: tuple[Any, Exception | None] = (None, None)
    if decides:
        try:
            outcome = (compute(), None)
        except Exception as error:
            outcome = (None, error)
    result, failure = agree(outcome)
    if failure is not None:
        raise failure
    decided: T = result
    return decided
