"""Whether cuts inside blocks make a step shorter, and which blocks they fall in."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_pp.errors import ConfigurationError, ScheduleError, SplitError
from lightning_pp.planning.refinement.blocks import refinable, what_differs
from lightning_pp.planning.stage_model import RecordedModel, Refinement
from lightning_pp.planning.tuning import (
    WORTH_A_SPLIT_HEAD,
    ChosenCuts,
    Layout,
    LayoutRequest,
    about_head,
    choose_cuts,
    layout_of,
    recording_of,
    step_ms,
)
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.cut.unit_costs import estimate_unit_costs, weighted

# A step has to get shorter by this much: the code of a block that is cut runs on every stage, on fakes.
_WORTH_A_REFINEMENT = 0.98

Record = Callable[[Collection[str], int], RecordedModel | None]
"""Records the step with the named units refined and so many parts of a head; None where that cannot be done."""
Decided = Callable[[Callable[[], Any]], Any]
Request = Callable[[RecordedModel], LayoutRequest]


class Refined(NamedTuple):
    """A model with units refined, and how it is laid out.

    Attributes:
        recording: The model; its ``refinement`` says why.
        layout: With cuts inside of blocks.
    """

    recording: RecordedModel
    layout: Layout


class _Finer(NamedTuple):
    """A model with units refined, and their names."""

    recording: RecordedModel
    names: tuple[str, ...]


def refine_cuts(
    recording: RecordedModel,
    partition: Partition | None,
    placement: Placement,
    request: Request,
    record: Record,
    decided: Decided = lambda compute: compute(),
) -> Refined | None:
    """The model with those units refined that a cut is to fall in; None where it is best as it is.

    Training decides by this, and whoever says beforehand what training will do. First all units that may be are
    refined, and the model is cut. Then those that a cut has come to fall in are, and no others; that is taken if a
    step, in the schedule that training would begin with, is estimated to take 2 % less. A head that may be in parts or
    whole is tried both ways. Where whole blocks do not keep the limit of memory, cuts inside of them are taken that do,
    however long a step is. Where the user names units or cuts, or gives costs, nothing is refined.

    Args:
        recording: The model, with the units that it was found to have.
        partition: Its cuts, or those of it with its head whole; None where none keep the limit of memory.
        placement: Which rank holds which stages.
        request: What cuts are chosen from, for a recording.
        record: Records the step again. Called on every rank, if ``decided`` is.
        decided: Gives what its argument returns on the rank that decides, on every rank.
    """
    chosen, slowest = None, math.inf
    if partition is not None:
        chosen = recording_of(partition, recording)
        slowest = _slowest(partition, placement, request(chosen))
    heads = [one for one in (recording, recording.whole) if one is not None]
    finer = [_refined(one, slowest, placement, request, record, decided) for one in heads]
    if not any(finer):
        return None
    found: tuple[int, Layout, Refinement] | None = decided(lambda: _best(heads, finer, chosen, placement, request))
    if found is None:
        return None
    which, layout, refinement = found
    best = finer[which]
    assert best is not None
    return Refined(best.recording.with_refinement(refinement), layout)


def _best(
    heads: Sequence[RecordedModel],
    finer: Sequence[_Finer | None],
    chosen: RecordedModel | None,
    placement: Placement,
    request: Request,
) -> tuple[int, Layout, Refinement] | None:
    """Which of ``finer`` is taken, how it is laid out, and why; None where ``chosen`` is best."""
    before = [_step_ms(_laid_out(one, placement, request), request(one)) for one in heads]
    layouts = [None if one is None else _laid_out(one.recording, placement, request) for one in finer]
    after = [_step_ms(layout, request(one)) for one, layout in zip(heads, layouts, strict=True)]
    times = [min(pair) for pair in zip(before, after, strict=True)]
    is_split = len(heads) == 2 and times[0] < WORTH_A_SPLIT_HEAD * times[1]
    which = 0 if is_split else len(heads) - 1
    best, layout = finer[which], layouts[which]
    before_ms = next((time for one, time in zip(heads, before, strict=True) if one is chosen), math.inf)
    if best is None or layout is None or after[which] > _WORTH_A_REFINEMENT * before_ms:
        return None
    if len(heads) == 2 and max(times) < math.inf:
        layout = replace(layout, about_head=about_head(heads[0], is_split, *times))
    return which, layout, Refinement(best.names, before_ms, after[which])


def _refined(
    whole: RecordedModel, slowest: float, placement: Placement, request: Request, record: Record, decided: Decided
) -> _Finer | None:
    """``whole`` with those units refined that a cut is to fall in, if a step could be shorter than with ``slowest``."""
    names = decided(lambda: _worth_trying(whole, slowest, placement, request(whole)))
    if not names:
        return None
    finest = _recorded_alike(whole, names, record, decided)
    if finest is None:
        return None
    names = decided(lambda: _cut_in(finest, names, placement, request(finest)))
    if not names:
        return None
    finer = _recorded_alike(whole, names, record, decided)
    if finer is None:
        return None
    return _Finer(finer, tuple(names))


def _recorded_alike(
    whole: RecordedModel, names: Collection[str], record: Record, decided: Decided
) -> RecordedModel | None:
    """The refined model, if its step does nothing otherwise on the rank that decides, and can be had on every rank."""
    finer = record(names, whole.num_head_parts)
    if finer is None:
        return None
    return finer if decided(lambda: what_differs(whole, finer, names)) is None else None


def _slowest(partition: Partition, placement: Placement, request: LayoutRequest) -> float:
    """The time of the slowest rank: FLOPs on a rank of speed 1."""
    speeds = request.cut.rank_speeds or [1.0] * placement.num_ranks
    times = [0.0] * placement.num_ranks
    for unit, cost in partition.unit_costs.items():
        rank = placement.rank_of_stage[partition.stage_of_unit[unit]]
        times[rank] += cost.total / speeds[rank]
    return max(times)


def _worth_trying(recording: RecordedModel, slowest: float, placement: Placement, request: LayoutRequest) -> list[str]:
    """All units that may be refined; none where no cut inside of them could make a step 2 % shorter."""
    cut = request.cut
    is_given = cut.units is not None or cut.split_points is not None or request.options.costs is not None
    if is_given or placement.num_ranks == 1 or recording.record.failure is not None:
        return []
    try:
        costs = estimate_unit_costs(recording.record, recording.num_parameters, cut.flops_per_byte)
        units = weighted(costs, cut.unit_weights or {})
    except ConfigurationError:  # a weight for a head that is in parts here, or whole
        return []
    names = refinable(recording)
    speeds = cut.rank_speeds or [1.0] * placement.num_ranks
    largest = max((cost.total for unit, cost in units.items() if unit not in names), default=0.0)
    at_least = max(sum(cost.total for cost in units.values()) / sum(speeds), largest / max(speeds))
    return names if at_least < _WORTH_A_REFINEMENT * slowest else []


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


def _laid_out(recording: RecordedModel, placement: Placement, request: Request) -> Layout | None:
    """As training would lay it out; None where it cannot."""
    asked = request(recording)
    try:
        cuts = choose_cuts(recording.record, recording.num_parameters, asked, placement)
        return layout_of(ChosenCuts(recording, *cuts, ""), asked, placement)
    except (ConfigurationError, SplitError, ScheduleError):
        return None


def _step_ms(layout: Layout | None, request: LayoutRequest) -> float:
    return math.inf if layout is None else step_ms(layout, request)
