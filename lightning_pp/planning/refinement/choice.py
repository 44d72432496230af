"""The choice of cuts: a head whole or in parts, blocks whole or cut inside, on one placement or the best of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_pp.errors import ConfigurationError, ScheduleError, SplitError
from lightning_pp.planning.refinement.blocks import refinable, what_differs
from lightning_pp.planning.schedules.predictions import step_time
from lightning_pp.planning.stage_costs import assumed_speed, estimated_times
from lightning_pp.planning.stage_model import RecordedModel, Refinement
from lightning_pp.planning.tuning import Layout, LayoutRequest, best_layout, choose_cuts, layout_of
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.cut.unit_costs import UnitCost, estimate_unit_costs, stage_costs, weighted

# A head in parts has a whole copy of its weight, with its gradient, on each stage that has a part.
_WORTH_A_SPLIT_HEAD = 0.97
# A step has to get shorter by this much: the code of a block that is cut runs on every stage, on fakes.
_WORTH_A_REFINEMENT = 0.98

Record = Callable[[Collection[str], int], RecordedModel | None]
"""Records the step with the named units refined and this number of parts of a head; None if it cannot."""
Decided = Callable[[Callable[[], Any]], Any]
Request = Callable[[RecordedModel], LayoutRequest]


@dataclass(frozen=True)
class Cuts:
    """Cuts of one recording for one placement.

    Attributes:
        partition: Which stage each unit is on.
        costs: Measured costs of its units, in milliseconds, if any.
        step_ms: The estimated time of a step, by which candidates are compared; 0 where there is one.
        about_head: How a head in parts compares with a whole one, a sentence; empty where that was no question.
        refinement: Which blocks are cut inside, and why; None for none.
    """

    partition: Partition
    costs: Mapping[str, UnitCost] | None
    step_ms: float
    about_head: str = ""
    refinement: Refinement | None = None


class CutChoice:
    """Chooses the cuts of a model; training, its plan and the search of plans ask the same.

    On a placement the candidates are the head whole or in parts, each with blocks whole and with those blocks refined
    that a cut falls in. The estimated time of a step decides: a head in parts has to make it 3 % shorter, cuts inside
    of blocks 2 %. Where whole blocks do not keep the limit of memory, cuts inside of them are taken that do, however
    long a step is. Where the user names units or cuts, or gives costs, no block is refined. Among placements the first
    schedule of each with whole blocks decides (:func:`best_layout`).

    Args:
        recording: The model, with the units that it was found to have.
        request: What cuts are chosen from, for a recording.
        record: Records the step again; None: blocks stay whole. It is called on every rank, if ``decided`` is.
        decided: Returns on every rank what its argument returns on the rank that decides.
    """

    def __init__(
        self,
        recording: RecordedModel,
        request: Request,
        record: Record | None,
        decided: Decided = lambda compute: compute(),
    ) -> None:
        self._heads = [one for one in (recording, recording.whole) if one is not None]
        self._request = request
        self._record = record
        self._decided = decided
        self._made: dict[tuple[int, Placement], tuple[RecordedModel, Cuts]] = {}  # which keep their ids

    def layout(self) -> tuple[RecordedModel, Layout]:
        """The recording that is laid out, and how.

        Raises:
            ConfigurationError, SplitError, ScheduleError: As :func:`~lightning_pp.planning.tuning.best_layout` says.
        """
        whole, refusal = self._decided(self._best_layout)
        placements = self._request(self._heads[0]).placements if whole is None else [whole.placement]
        for placement in placements:
            found = self._refined(placement)
            if found is None:
                continue
            try:
                layout: Layout = self._decided(partial(self._layout, *found, placement))
            except (ConfigurationError, SplitError, ScheduleError):
                continue
            if whole is not None:
                about_head = layout.about_head or whole.about_head
                layout = replace(layout, reason=whole.reason, rejected=whole.rejected, about_head=about_head)
            return found[0], layout
        if whole is None:
            raise refusal
        # a replica whose batch calls other units has none with those of the rank that decides
        units = set(whole.partition.unit_costs)
        return next((one for one in self._heads if set(one.record.first_calls()) == units), self._heads[0]), whole

    def cuts(self, placement: Placement) -> tuple[RecordedModel, Cuts]:
        """The recording that is cut for ``placement``, and its cuts.

        Raises:
            ConfigurationError, SplitError: There are none.
        """
        try:
            whole = self._whole_blocks(placement)
        except ConfigurationError:
            found = None if self._request(self._heads[0]).memory is None else self._refined(placement)
            if found is None:
                raise
            return found
        recording, cuts = self._refined(placement) or whole
        return recording, replace(cuts, about_head=cuts.about_head or whole[1].about_head)

    def _best_layout(self) -> tuple[Layout | None, ConfigurationError | None]:
        """The layout with whole blocks; why there is none, where that may be for lack of memory."""
        request = self._request(self._heads[0])
        try:
            return best_layout(lambda on: self._layout(*self._whole_blocks(on), on), request), None
        except ConfigurationError as error:
            if request.memory is None:
                raise
            return None, error

    def _layout(self, recording: RecordedModel, cuts: Cuts, placement: Placement) -> Layout:
        layout = layout_of(recording.counted.record, (cuts.partition, cuts.costs), self._request(recording), placement)
        return replace(layout, about_head=cuts.about_head)

    def _whole_blocks(self, placement: Placement) -> tuple[RecordedModel, Cuts]:
        """The better one of a head in parts and whole."""
        found: list[tuple[RecordedModel, Cuts]] = []
        failures: list[Exception] = []
        for one in self._heads:
            try:
                found.append((one, self._cuts_of(one, placement)))
            except (ConfigurationError, SplitError) as error:
                failures.append(error)
        if not found:
            raise failures[-1]
        if len(found) == 1:
            return found[0]
        measured = [pair for pair in found if pair[1].costs is not None]
        if len(measured) == 1:
            return measured[0]
        times = [cuts.step_ms for _, cuts in found]
        recording, cuts = found[_head_for(times)]
        return recording, replace(cuts, about_head=_about_head(self._heads[0], times))

    def _refined(self, placement: Placement) -> tuple[RecordedModel, Cuts] | None:
        """Cuts inside of blocks; None where it is best to have blocks whole."""
        if self._record is None:
            return None
        before = self._decided(lambda: self._times_before(placement))
        finer = [self._refined_head(one, before, placement) for one in self._heads]
        if not any(finer):
            return None
        found: tuple[int, Cuts] | None = self._decided(lambda: self._best_refined(finer, before[1], placement))
        if found is None:
            return None
        which, cuts = found
        best = finer[which]
        assert best is not None
        return replace(best[0], refinement=cuts.refinement, about_head=self._heads[0].about_head), cuts

    def _best_refined(
        self, finer: Sequence[tuple[RecordedModel, Sequence[str]] | None], before_ms: float, placement: Placement
    ) -> tuple[int, Cuts] | None:
        """Which of ``finer`` is taken, and its cuts; None where whole blocks are best."""
        whole = [self._cuts_or_none(one, placement) for one in self._heads]
        cuts = [None if one is None else self._cuts_or_none(one[0], placement) for one in finer]
        before, after = ([math.inf if one is None else one.step_ms for one in found] for found in (whole, cuts))
        times = [min(pair) for pair in zip(before, after, strict=True)]
        which = _head_for(times)
        best, names = cuts[which], finer[which]
        if best is None or names is None or after[which] > _WORTH_A_REFINEMENT * before_ms:
            return None
        if len(times) == 2 and max(times) < math.inf:
            best = replace(best, about_head=_about_head(self._heads[0], times))
        return which, replace(best, refinement=Refinement(tuple(names[1]), before_ms, after[which]))

    def _refined_head(
        self, whole: RecordedModel, before: tuple[float, float], placement: Placement
    ) -> tuple[RecordedModel, Sequence[str]] | None:
        """``whole`` with those units refined that a cut is to fall in, and their names.

        First all units that may be are refined, and the model is cut; then those that a cut has come to fall in.
        """
        names: Sequence[str] = self._decided(lambda: _worth_trying(whole, before, placement, self._request(whole)))
        finest = self._recorded_alike(whole, names)
        if finest is None:
            return None
        tried, names = names, self._decided(lambda: self._cut_in(finest, names, before[1], placement))
        finer = finest if names == tried else self._recorded_alike(whole, names)
        return None if finer is None else (finer, names)

    def _cut_in(
        self, finest: RecordedModel, names: Collection[str], before_ms: float, placement: Placement
    ) -> list[str]:
        """Those of the refined units that a cut falls in; none where cuts inside of all of them are not worth it."""
        cuts = self._cuts_or_none(finest, placement)
        if cuts is None or cuts.step_ms > _WORTH_A_REFINEMENT * before_ms:
            return []
        stage_of = {unit: cuts.partition.stage_of_unit[unit] for unit in finest.record.first_calls()}
        return [name for name in names if len({stage_of[unit] for unit in stage_of if unit.startswith(f"{name}.")}) > 1]

    def _recorded_alike(self, whole: RecordedModel, names: Sequence[str]) -> RecordedModel | None:
        """The refined model, if its step does nothing otherwise on the rank that decides, and can be had on all."""
        finer = None if not names or self._record is None else self._record(names, whole.num_head_parts)
        if finer is None:
            return None
        return finer if self._decided(lambda: what_differs(whole, finer, names)) is None else None

    def _times_before(self, placement: Placement) -> tuple[float, float]:
        """With whole blocks, of the slowest rank, in FLOPs on a rank of speed 1, and of a step, in ms."""
        try:
            recording, cuts = self._whole_blocks(placement)
        except (ConfigurationError, SplitError):
            return math.inf, math.inf
        speeds = self._request(recording).cut.rank_speeds or [1.0] * placement.num_ranks
        times = [0.0] * placement.num_ranks
        for unit, cost in cuts.partition.unit_costs.items():
            rank = placement.rank_of_stage[cuts.partition.stage_of_unit[unit]]
            times[rank] += cost.total / speeds[rank]
        return max(times), cuts.step_ms

    def _cuts_or_none(self, recording: RecordedModel, placement: Placement) -> Cuts | None:
        try:
            return self._cuts_of(recording, placement)
        except (ConfigurationError, SplitError):
            return None

    def _cuts_of(self, recording: RecordedModel, placement: Placement) -> Cuts:
        """The best cuts of ``recording``, and the time of a step with them; found once."""
        key = id(recording), placement
        if key not in self._made:
            request, counted = self._request(recording), recording.counted
            partition, costs = choose_cuts(counted.record, counted.num_parameters, request, placement)
            compares = self._record is not None or len(self._heads) > 1
            step_ms = _time_of_step(recording, partition, request, placement) if compares else 0.0
            self._made[key] = recording, Cuts(partition, costs, step_ms, recording.about_head)
        return self._made[key][1]


def _time_of_step(
    recording: RecordedModel, partition: Partition, request: LayoutRequest, placement: Placement
) -> float:
    """Of the schedule that training begins with, messages counted; where costs are given, by what is known of units.

    Where that is searched for, of one made by hand.
    """
    source, speeds = request.options.source, request.cut.speeds_of_stages(placement)
    if request.options.costs is not None:
        times = stage_costs(partition.unit_costs, partition.stage_of_unit, speeds)
    elif recording.record.failure is not None:
        return 0.0  # it ends before there is anything to compare
    else:
        times = estimated_times(
            recording.counted.record,
            partition,
            assumed_speed(request.device_type),
            speeds,
            whole_batch_loss=request.options.whole_batch_loss,
        )
    number = request.num_microbatches
    by_hand = source.program_to_cut_by(placement, number) if source.is_searched else None
    return step_time(by_hand or source.program(placement, number, times), times)


def _head_for(times: Sequence[float]) -> int:
    """Whether the head is in parts (0) or whole, by the times of a step with each."""
    return 0 if len(times) == 2 and times[0] < _WORTH_A_SPLIT_HEAD * times[1] else len(times) - 1


def _about_head(recording: RecordedModel, times: Sequence[float]) -> str:
    """How a step with a head in parts compares with one with it whole, in a sentence."""
    split_time, whole_time = times
    head = recording.record.split_head
    number = sum(call.unit.startswith(f"{head}[") for call in recording.record.calls)
    if _head_for(times) == 0:
        verdict = f"is cut along its classes into {number} parts. With a whole head, a step is estimated to take"
        return f"The head {head!r} {verdict} {whole_time / split_time:.2f} times as long."
    verdict = f"stays whole on one stage. With {number} parts, a step is estimated to take"
    return f"The head {head!r} {verdict} {split_time / whole_time:.2f} times as long."


def _worth_trying(
    recording: RecordedModel, before: tuple[float, float], placement: Placement, request: LayoutRequest
) -> list[str]:
    """All units that may be refined; none where no cut inside of them could make a step 2 % shorter."""
    cut = request.cut
    is_given = cut.units is not None or cut.split_points is not None or request.options.costs is not None
    if is_given or placement.num_ranks == 1 or recording.record.failure is not None:
        return []
    try:
        counted, weights = recording.counted, cut.unit_weights or {}
        units = weighted(estimate_unit_costs(counted.record, counted.num_parameters, cut.flops_per_byte), weights)
    except ConfigurationError:  # a weight for a head that is in parts here, or whole
        return []
    names = refinable(recording)
    speeds = cut.rank_speeds or [1.0] * placement.num_ranks
    largest = max((cost.total for unit, cost in units.items() if unit not in names), default=0.0)
    at_least = max(sum(cost.total for cost in units.values()) / sum(speeds), largest / max(speeds))
    slowest, step_ms = before
    # the slowest rank has less to do for each microbatch; there are as many actions and messages as before
    flops = (request.num_microbatches + placement.num_ranks) * (slowest - at_least)
    most_ms = flops / assumed_speed(request.device_type).flops_per_ms
    return names if at_least < _WORTH_A_REFINEMENT * slowest and most_ms >= (1 - _WORTH_A_REFINEMENT) * step_ms else []
