"""Whether cuts inside blocks make a step shorter, and which blocks they fall in."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from lightning_pp.errors import ConfigurationError, ScheduleError, SplitError
from lightning_pp.planning.refinement.blocks import refinable, what_differs
from lightning_pp.planning.stage_model import RecordedModel, Refinement
from lightning_pp.planning.tuning import LayoutRequest, choose_cuts, costs_of
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.partition import Partition

# A step has to get shorter by this much: the code of a block that is cut runs on every stage, on fakes.
_WORTH_A_REFINEMENT = 0.98

Record = Callable[[Collection[str]], RecordedModel | None]
"""Records the step with the named units refined; None where that cannot be done."""


def refine_cuts(
    whole: RecordedModel,
    partition: Partition,
    placement: Placement,
    request: Callable[[RecordedModel], LayoutRequest],
    record: Record,
    decided: Callable[[Callable[[], Any]], Any] = lambda compute: compute(),
) -> RecordedModel:
    """The model with those units refined that a cut is to fall in, or as it is.

    First all units that may be are refined, and the model is cut. Then those that a cut has come to fall in are,
    and no others; that is taken if the schedule that cuts are made by takes 2 % less for a step, by the estimated costs
    of its stages. Where the user names units or cuts, or gives costs, nothing is refined.

    Args:
        whole: The model, with the units that it was found to have.
        partition: Its cuts.
        placement: Which rank holds which stages.
        request: What cuts are chosen from, for a recording.
        record: Records the step again. Called on every rank, if ``decided`` is.
        decided: Gives what its argument returns on the rank that decides, on every rank.
    """
    names = decided(lambda: _worth_trying(whole, partition, placement, request(whole)))
    if not names:
        return whole
    finest = _recorded_alike(whole, names, record, decided)
    if finest is None:
        return whole
    names = decided(lambda: _cut_in(finest, names, placement, request(finest)))
    if not names:
        return whole
    finer = _recorded_alike(whole, names, record, decided)
    if finer is None:
        return whole
    before = decided(lambda: _step_ms(whole, partition, placement, request(whole)))
    after = decided(lambda: _best_step_ms(finer, placement, request(finer)))
    if after > before * _WORTH_A_REFINEMENT:
        return whole
    return finer.with_refinement(Refinement(tuple(names), before, after))


def _recorded_alike(
    whole: RecordedModel, names: Collection[str], record: Record, decided: Callable[[Callable[[], Any]], Any]
) -> RecordedModel | None:
    """The refined model, if its step does nothing otherwise on the rank that decides, and can be had on every rank."""
    finer = record(names)
    if finer is None:
        return None
    return finer if decided(lambda: what_differs(whole, finer, names)) is None else None


def _worth_trying(
    recording: RecordedModel, partition: Partition, placement: Placement, request: LayoutRequest
) -> list[str]:
    """All units that may be refined; none where no cut inside of them could make a step 2 % shorter."""
    cut = request.cut
    is_given = cut.units is not None or cut.split_points is not None or request.options.costs is not None
    if is_given or placement.num_ranks == 1 or recording.record.failure is not None:
        return []
    names = refinable(recording)
    speeds = cut.rank_speeds or [1.0] * placement.num_ranks
    costs = {unit: cost.total for unit, cost in partition.unit_costs.items()}
    times = [0.0] * placement.num_ranks
    for unit, cost in costs.items():
        rank = placement.rank_of_stage[partition.stage_of_unit[unit]]
        times[rank] += cost / speeds[rank]
    largest = max((cost for unit, cost in costs.items() if unit not in names), default=0.0)
    at_least = max(sum(costs.values()) / sum(speeds), largest / max(speeds))
    return names if at_least < _WORTH_A_REFINEMENT * max(times) else []


def _cut_in(
    recording: RecordedModel, names: Collection[str], placement: Placement, request: LayoutRequest
) -> list[str]:
    """Those of the refined units that a cut falls in."""
    try:
        partition, _ = choose_cuts(recording.record, recording.num_parameters, request, placement)
    except (ConfigurationError, SplitError):
        return []
    called = recording.record.first_calls()
    found = []
    for name in names:
        stages = {partition.stage_of_unit[unit] for unit in called if unit.startswith(f"{name}.")}
        if len(stages) > 1:
            found.append(name)
    return found


def _best_step_ms(recording: RecordedModel, placement: Placement, request: LayoutRequest) -> float:
    try:
        partition, _ = choose_cuts(recording.record, recording.num_parameters, request, placement)
        return _step_ms(recording, partition, placement, request)
    except (ConfigurationError, SplitError, ScheduleError):
        return float("inf")


def _step_ms(recording: RecordedModel, partition: Partition, placement: Placement, request: LayoutRequest) -> float:
    """Estimated time of a step in a row of overlapping ones, in the schedule that cuts are made by."""
    costs = costs_of(recording.record, partition, placement, request, None)
    program = request.options.source.program_to_cut_by(placement, request.num_microbatches)
    return max(program.simulate(costs).span_ms)
