"""Every schedule for one model: its time, its memory, its messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lightning_pp.cli.plan.costs import Costs
from lightning_pp.cli.plan.memory import PlanMemory, RankBytes
from lightning_pp.errors import ConfigurationError, ScheduleError, SplitError
from lightning_pp.planning.model_cutter import ModelCutter
from lightning_pp.planning.plan_summary import CutSummary, summarize_cut
from lightning_pp.planning.schedules.source import ScheduleSource, Searched, schedule_source
from lightning_pp.planning.stage_costs import with_host
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import BubbleFraction, Placement, Schedule, StageCosts, available_schedules
from lightning_pp.schedule.simulation.memory import held_by_ranks

# As the search for schedules: the shortest longest span among makespans within this of the shortest.
_MAKESPAN_TOLERANCE = 0.005
_GIB = float(1 << 30)
_ORDER = (
    *("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min"),
    "dualpipe_v",
)


def known_schedules() -> list[str]:
    """All schedules, in the order in which they are compared and told."""
    return sorted(available_schedules(), key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))


@dataclass(frozen=True)
class ModelCut:
    """A model cut for one placement, with the costs of its stages.

    Attributes:
        split: The cut.
        summary: Its stages and what crosses.
        costs: Of its stages; what they hold in bytes.
        about_head: What cutting the head would do, a sentence; empty if it was not considered.
    """

    split: SplitModel
    summary: CutSummary
    costs: StageCosts
    about_head: str = ""


@dataclass(frozen=True)
class PlannedSchedule:
    """One schedule for one cut.

    Attributes:
        source: What ``strategy.schedule`` names.
        schedule: Its programs.
        cut: The stages.
        step_time: Of a step alone, from the first start to the last end on any rank.
        time_in_a_row: Of a step in a row of steps: the longest span of a rank, where steps overlap.
        bubble_fraction: ``1 - work / time_in_a_row``, the zero-bubble papers' definition.
        rank_bubbles: ``1 - work / span`` of each rank.
        peak_microbatches: The most on each rank at a time, as :meth:`PlanMemory.microbatches` counts them.
        memory: What each rank holds.
        fits: Whether that is within the limit.
        without: With ``whole_batch_loss``, the same schedule on the same cut without it; else None.
    """

    source: ScheduleSource
    schedule: Schedule
    cut: ModelCut
    step_time: float
    time_in_a_row: float
    bubble_fraction: float
    rank_bubbles: tuple[float, ...]
    peak_microbatches: tuple[float, ...]
    memory: tuple[RankBytes, ...]
    fits: bool
    without: PlannedSchedule | None = None

    @property
    def name(self) -> str:
        """What ``strategy.schedule`` takes."""
        return self.source.name

    @property
    def is_searched(self) -> bool:
        """Whether it was searched for; ``schedule.name`` says from what then."""
        return self.source.is_searched

    @property
    def most_activations(self) -> int:
        """Bytes of activations on the rank that has most of them."""
        return max(rank.activations for rank in self.memory)

    @property
    def stages_per_rank(self) -> int:
        """Stages on each rank."""
        return self.schedule.placement.num_stages // self.schedule.placement.num_ranks

    @property
    def peak_bytes(self) -> int:
        """What the fullest rank holds."""
        return max(rank.peak for rank in self.memory)


@dataclass(frozen=True)
class UnusableSchedule:
    """A schedule that is not possible here.

    Attributes:
        name: Its name.
        stages_per_rank: Stages on each rank.
        reason: Why.
    """

    name: str
    stages_per_rank: int
    reason: str


@dataclass
class ScheduleTable:
    """All schedules.

    Attributes:
        usable: Those that can be had, those over the memory limit included.
        unusable: The others.
    """

    usable: list[PlannedSchedule] = field(default_factory=list)
    unusable: list[UnusableSchedule] = field(default_factory=list)

    @property
    def best(self) -> PlannedSchedule | None:
        """The shortest in a row of steps, of those within the limit that are hardly longer than the shortest alone.

        Among equals the one that sends less, then the one named first.
        """
        fitting = [planned for planned in self.usable if planned.fits]
        if not fitting:
            return None
        longest = (1 + _MAKESPAN_TOLERANCE) * min(planned.step_time for planned in fitting)
        short = [planned for planned in fitting if planned.step_time <= longest]
        return min(short, key=lambda planned: (round(planned.time_in_a_row, 9), planned.cut.summary.sent_bytes))

    def named(self, name: str, placement: Placement | None = None) -> PlannedSchedule | None:
        """The schedule of that name, on that placement if one is given; the shortest of several."""
        found = [
            planned
            for planned in self.usable
            if planned.name == name and placement in (None, planned.schedule.placement)
        ]
        return min(found, key=lambda planned: (not planned.fits, planned.step_time), default=None)


class Planner:
    """Builds schedules for one model, whose cuts it keeps.

    Args:
        cutter: Cuts the model.
        costs: What stages cost.
        memory: What they hold.
        limit_bytes: The most that a rank may hold; None for no limit.
    """

    def __init__(self, cutter: ModelCutter, costs: Costs, memory: PlanMemory, limit_bytes: float | None = None) -> None:
        self._cutter = cutter
        self._costs = costs
        self._memory = memory
        self._limit = limit_bytes
        self._cuts: dict[str, ModelCut] = {}
        self._num_ranks = cutter.sizes.pipeline
        self._num_microbatches = cutter.num_microbatches

    def cut(self, source: ScheduleSource, placement: Placement) -> ModelCut:
        """The model cut for the schedules of ``source`` on ``placement``; equal cuts are one object.

        Raises:
            ConfigurationError, SplitError: It cannot be.
        """
        cut = self._cutter.split(placement, source)
        key = repr((placement.rank_of_stage, sorted(cut.split.partition.stage_of_unit.items())))
        if key not in self._cuts:
            summary = summarize_cut(cut.split)
            costs = self._costs.of(cut, summary.crossings, *self._memory.held(cut.split))
            if self._cutter.options.schedule.activation_offload:
                costs = with_host(costs, self._memory.offloadable(cut.split), 1.0)
                costs = costs if self._costs.links is not None else replace(costs, offload=0.0)
            self._cuts[key] = ModelCut(cut.split, summary, costs, cut.about_head)
        return self._cuts[key]

    def table(
        self, names: Sequence[str] | None = None, tell: Callable[[str], None] = lambda text: None
    ) -> ScheduleTable:
        """Builds every schedule.

        Families that cannot have the run's stages on each rank have as many as is usual for them.

        Args:
            names: The schedules to build, by default all; that of the run is in the table whatever they are.
            tell: Called with the one that is being built.

        Raises:
            ScheduleError: A name is unknown, or a CSV file does not fit.
        """
        table = ScheduleTable()
        configured = self._cutter.options.schedule.source
        for name in dict.fromkeys([*(names or known_schedules()), configured.name]):
            seconds = (
                configured.search_seconds if isinstance(configured, Searched) and name == configured.name else None
            )
            source = schedule_source(name, whole_batch_loss=configured.whole_batch_loss, search_seconds=seconds)
            source = source.with_stages_per_rank(configured.stages_per_rank)
            placements = source.placements(self._num_ranks)
            tell(f"building and simulating {name}")
            for placement in sorted(placements, key=lambda one: (one.num_stages, one.kind == "V")):
                number = placement.num_stages // self._num_ranks
                try:
                    table.usable.append(self.plan(source, placement))
                except (ConfigurationError, SplitError, ScheduleError) as error:
                    if name == configured.name and configured.stages_per_rank in (None, number):
                        raise
                    reason = str(error).partition(": ")[0] if isinstance(error, ConfigurationError) else str(error)
                    table.unusable.append(UnusableSchedule(name, number, reason.splitlines()[0]))
        return table

    def plan(self, source: ScheduleSource, placement: Placement) -> PlannedSchedule:
        """The schedule of ``source`` on ``placement``, and what it takes and holds.

        Raises:
            ConfigurationError, SplitError, ScheduleError: It cannot be had.
        """
        cut = self.cut(source, placement)
        if not source.whole_batch_loss:
            return self._built(source, cut, self._memory)
        memory = self._memory.without_whole_batch_loss
        after_forward, after_input = memory.held(cut.split)
        costs = replace(cut.costs, held_after_forward=after_forward, held_after_input=after_input)
        without = self._built(replace(source, whole_batch_loss=False), replace(cut, costs=costs), memory)
        return replace(self._built(source, cut, self._memory), without=without)

    def _built(self, source: ScheduleSource, cut: ModelCut, counts: PlanMemory) -> PlannedSchedule:
        """The schedule on ``cut``; ``counts`` what ranks hold with or without ``whole_batch_loss``, as ``source``."""
        limits = self._search_limits(source, cut, counts) if source.is_searched else None
        schedule = source.program(cut.split.placement, self._num_microbatches, cut.costs, limits)
        simulation = schedule.simulate(cut.costs)
        time_in_a_row = max(simulation.span_ms)
        memory = tuple(counts.ranks(cut.split, schedule))
        return PlannedSchedule(
            source,
            schedule,
            cut,
            simulation.makespan,
            time_in_a_row,
            float(BubbleFraction(simulation.work_ms, [time_in_a_row] * len(simulation.work_ms))),
            simulation.bubble_fraction.per_rank,
            counts.microbatches(cut.split, schedule),
            memory,
            self._limit is None or max(rank.peak for rank in memory) <= self._limit,
        )

    def _search_limits(self, source: ScheduleSource, cut: ModelCut, counts: PlanMemory) -> Sequence[float]:
        """What microbatches may hold on each rank in a search: as in training, and within what the device has left."""
        placement, asked_gib = cut.split.placement, self._cutter.options.schedule.memory_limit_gib
        asked = None if asked_gib is None else asked_gib * _GIB  # the costs of a plan have bytes
        usual = source.memory_limit(asked, cut.costs, placement)
        if usual is None:  # all microbatches are held in any case
            usual = math.inf
        limits = [usual] * placement.num_ranks if isinstance(usual, (int, float)) else list(usual)
        if self._limit is None:
            return limits
        room = counts.room(cut.split, self._limit)
        needed = held_by_ranks(cut.costs, placement, self._num_microbatches if counts.whole_batch_loss else 0)
        # without any room the search has nothing to keep to: what it finds is over the limit, and is told to be
        has_room = all(left >= need for left, need in zip(room, needed, strict=True))
        return [min(pair) for pair in zip(limits, room, strict=True)] if has_room else limits
