"""The search: bounds for all plans, a cut and a simulation for those that may be among the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heappop, heappush
from operator import itemgetter

from lightning_pp.cli.plan.collectives import Collectives
from lightning_pp.cli.plan.costs import Costs, Speed
from lightning_pp.cli.plan.memory import PlanMemory
from lightning_pp.cli.plan.schedules import PlannedSchedule, Planner
from lightning_pp.cli.plan.search.bounds import Blocks
from lightning_pp.cli.plan.search.recordings import Recordings
from lightning_pp.cli.plan.search.space import Layout, ShardingChoice, Space
from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.errors import ConfigurationError, ScheduleError, SplitError
from lightning_pp.planning.activation_checkpointing import policy_of
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.model_cutter import ModelCutter
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.stage_model import RecordedModel
from lightning_pp.schedule.registry import schedule_family
from lightning_pp.split.data.microbatch import Microbatch, first_samples
from lightning_pp.strategy.plan_only import FirstStep

NUM_BEST = 10
_WORTH_TELLING = 1.5
"""Plans with a step longer than this times the best are not listed, even if the list stays short."""
_IMPOSSIBLE = (ConfigurationError, SplitError, ScheduleError)


@dataclass(frozen=True)
class FoundPlan:
    """One plan, cut and simulated.

    Attributes:
        layout: Where the model is cut, and in which order it runs.
        sharding: What data-parallel ranks share.
        planned: The schedule on its cut; its memory is that of this plan.
        time_in_a_row: Of a step in a row of steps, milliseconds; with gathers and reductions, if the plan fits.
    """

    layout: Layout
    sharding: ShardingChoice
    planned: PlannedSchedule
    time_in_a_row: float

    @property
    def order(self) -> tuple[float, int]:
        """The shorter step comes first; among equals the one that holds less."""
        return round(self.time_in_a_row, 9), self.planned.peak_bytes


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        best: The best plan of each of the best layouts, the shortest step first: at most :data:`NUM_BEST`, and none
            that takes half as long again as the first.
        num_plans: Plans there are.
        num_cut: Those that were cut and simulated.
        num_too_large: Those that do not fit the memory, by a cut or by a bound.
        num_slower: Those that cannot be among the best, by a bound.
        impossible: Those that cannot be had, with the reason.
        least: Where none fits, the one whose fullest rank holds least.
    """

    best: list[FoundPlan] = field(default_factory=list)
    num_plans: int = 0
    num_cut: int = 0
    num_too_large: int = 0
    num_slower: int = 0
    impossible: list[tuple[Layout, str]] = field(default_factory=list)
    least: FoundPlan | None = None

    def add(self, found: FoundPlan) -> None:
        """Takes up a plan that fits."""
        best = sorted([*self.best, found], key=lambda plan: plan.order)[:NUM_BEST]
        self.best = [plan for plan in best if plan.time_in_a_row <= _WORTH_TELLING * best[0].time_in_a_row]

    def give_up(self, layout: Layout, number: int, error: Exception) -> None:
        """Takes up so many plans of ``layout`` that cannot be had."""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        self.impossible += [(layout, reason)] * number

    @property
    def longest(self) -> float:
        """A plan with a longer step is not among the best."""
        if not self.best:
            return float("inf")
        longest = _WORTH_TELLING * self.best[0].time_in_a_row
        return min(longest, self.best[-1].time_in_a_row) if len(self.best) == NUM_BEST else longest


class PlanSearch:
    """Finds the best plans of a space, all with cuts between whole blocks.

    Args:
        step: The first step of the training.
        options: As configured, of which a plan changes what :class:`Layout` and :class:`ShardingChoice` have.
        space: The plans.
        speed: Of a device, for one replica.
        limit_bytes: The most that a rank may hold; None for no limit.
    """

    def __init__(
        self, step: FirstStep, options: PipelineOptions, space: Space, speed: Speed, limit_bytes: float | None
    ) -> None:
        self._step = step
        self._options = options
        self._space = space
        self._speed = speed
        self._limit = limit_bytes
        # one object for equal arguments
        self._costs = cache(self._make_costs)
        self._recordings = cache(self._make_recordings)
        self._memory_model = cache(self._make_memory_model)
        wishes = replace(options.cut, flops_per_byte=step.device.flops_per_byte)
        self._blocks = cache(lambda recording: Blocks.of(recording, self._costs(1), wishes))
        self._state = cache(lambda blocks, choice, num: blocks.state(self._memory_model(choice, num)))
        self._first_sizes: dict[bool, int] = {}

    def run(self, tell: Callable[[str], None] = lambda text: None) -> SearchResult:
        """Looks at all plans.

        Args:
            tell: Called with what is being done.

        Raises:
            ConfigurationError, SplitError: The step cannot be looked at.
        """
        result = SearchResult()
        unfit: list[tuple[Layout, ShardingChoice]] = []
        waiting: list[tuple[float, int, Layout]] = []
        for place, layout in enumerate(self._space.layouts()):
            result.num_plans += len(self._space.sharding_of(layout))
            try:
                tell(f"recording the step on microbatches of size {layout.microbatch_size}")
                heappush(waiting, (self._least_time(layout), place, layout))
            except _IMPOSSIBLE as error:
                result.give_up(layout, len(self._space.sharding_of(layout)), error)
        while waiting:  # the shortest step comes first, by its work alone
            tell(f"comparing plans: {len(waiting)} layouts are left, {len(result.best)} found are among the best")
            least, _, layout = heappop(waiting)
            choices = self._space.sharding_of(layout)
            if least > result.longest:
                result.num_slower += len(choices)
            else:
                unfit += self._look_at(layout, choices, result)
        result.num_too_large = len(unfit)
        if not result.best:
            tell("looking for the plan that needs least memory")
            result.least = self._smallest_plan(unfit)
        return result

    # ---------------------------------------------------------------- one layout

    def _look_at(
        self, layout: Layout, choices: Sequence[ShardingChoice], result: SearchResult
    ) -> list[tuple[Layout, ShardingChoice]]:
        """Cuts and simulates plans of ``layout`` that may fit; those that do not fit."""
        may_fit = [choice for choice in choices if self._may_fit(layout, choice)]
        unfit = [(layout, choice) for choice in choices if choice not in may_fit]
        found: list[FoundPlan] = []
        like: PlannedSchedule | None = None
        for place, choice in enumerate(may_fit):
            if like is not None and self._is_shared(layout) and like.time_in_a_row > result.longest:
                result.num_slower += len(may_fit) - place  # no gathers and reductions make it shorter
                break
            try:
                plan = self._planned(layout, choice, like)
            except _IMPOSSIBLE as error:
                result.give_up(layout, 1, error)
                continue
            result.num_cut += 1
            like = plan.planned
            if plan.planned.fits:
                found.append(plan)
            else:
                unfit.append((layout, choice))
        if found:
            result.add(min(found, key=lambda plan: plan.order))
        return unfit

    def _is_shared(self, layout: Layout) -> bool:
        """Whether all shardings have the same cut and schedule."""
        return self._options.device_memory_gib is None and not schedule_family(layout.schedule).is_search

    def _planned(self, layout: Layout, choice: ShardingChoice, like: PlannedSchedule | None) -> FoundPlan:
        """One plan; ``like`` is its layout with another sharding."""
        cutter = self._cutter(layout, choice)
        model, sizes = self._memory_model(choice, layout.num_replicas), cutter.sizes
        counts = PlanMemory(model)
        source, costs = cutter.options.schedule.source, self._costs(layout.num_replicas * layout.num_tensor_ranks)
        links = costs.links
        assert links is not None, "only milliseconds compare computation with communication"
        if like is None or not self._is_shared(layout):
            planner = Planner(cutter, costs, counts, self._limit)
            several = [planner.plan(source, placement) for placement in source.placements(layout.num_ranks)]
            planned = min(several, key=lambda one: (not one.fits, one.time_in_a_row))
        else:
            memory = tuple(counts.ranks(like.cut.split, like.schedule))
            fits = self._limit is None or max(rank.peak for rank in memory) <= self._limit
            planned = replace(like, memory=memory, fits=fits)
        time = planned.time_in_a_row
        if layout.num_replicas > 1 and planned.fits:
            collectives = Collectives.of(planned.cut.split, model, sizes, links)
            time = collectives.time_in_a_row(planned.schedule, planned.cut.costs, time)
        return FoundPlan(layout, choice, planned, time)

    # ---------------------------------------------------------------- bounds

    def _least_time(self, layout: Layout) -> float:
        """No plan of ``layout`` has a shorter step in a row."""
        several = self._layout_blocks(layout)
        return layout.num_microbatches * min(blocks.longest_work(layout.num_ranks) for blocks in several)

    def _least_need(self, layout: Layout, choice: ShardingChoice) -> float:
        """The fullest rank of no plan holds less, bytes."""
        num_ranks, num_replicas = layout.num_ranks, layout.num_replicas
        several = self._layout_blocks(layout)
        return min(blocks.least_need(self._state(blocks, choice, num_replicas), num_ranks) for blocks in several)

    def _may_fit(self, layout: Layout, choice: ShardingChoice) -> bool:
        return self._limit is None or self._least_need(layout, choice) <= self._limit

    def _layout_blocks(self, layout: Layout) -> list[Blocks]:
        """Of the recording, and of the one with its head whole, where that is another."""
        recording = self._recording(layout)
        return [self._blocks(one) for one in (recording, recording.whole) if one is not None]

    def _smallest_plan(self, unfit: Sequence[tuple[Layout, ShardingChoice]]) -> FoundPlan | None:
        """The plan whose fullest rank holds least; plans whose bound is above that are not cut."""
        least: FoundPlan | None = None
        for need, (layout, choice) in sorted(((self._least_need(*pair), pair) for pair in unfit), key=itemgetter(0)):
            if least is not None and need >= least.planned.peak_bytes:
                break
            try:
                plan = self._planned(layout, choice, None)
            except _IMPOSSIBLE:
                continue
            if least is None or plan.planned.peak_bytes < least.planned.peak_bytes:
                least = plan
        return least

    # ---------------------------------------------------------------- what plans are made of

    def _cutter(self, layout: Layout, choice: ShardingChoice) -> ModelCutter:
        microbatches = [self._first(layout.microbatch_size)] * layout.num_microbatches
        recordings = [(layout.num_stages, self._recording(layout))]
        options = self.options_of(layout, choice)
        sizes = ParallelSizes(layout.num_ranks, layout.num_replicas, choice.replicate_size, layout.num_tensor_ranks)
        return self._step.cutter(options, sizes, microbatches, recordings, refines=False)

    def options_of(self, layout: Layout, choice: ShardingChoice) -> PipelineOptions:
        """The strategy's options for a plan."""
        options = self._options
        source = schedule_source(
            layout.schedule, layout.stages_per_rank_asked, whole_batch_loss=options.schedule.whole_batch_loss
        )
        return replace(
            options,
            schedule=replace(options.schedule, source=source),
            batches=replace(options.batches, num_microbatches=layout.num_microbatches),
            sharding=replace(options.sharding, mode=choice.mode, replicate_size=choice.replicate_size),
            activation_checkpointing=layout.activation_checkpointing,
        )

    def _make_costs(self, ranks_of_stage: int) -> Costs:
        links = replace(self._speed.links, num_replicas=ranks_of_stage)
        return Costs(replace(self._speed, links=links), None, self._options.cut)

    def _make_memory_model(self, choice: ShardingChoice, num_replicas: int) -> MemoryModel:
        sharding = replace(self._options.sharding, mode=choice.mode, replicate_size=choice.replicate_size)
        sizes = ParallelSizes(1, num_replicas, choice.replicate_size)
        options = replace(self._options, sharding=sharding)
        return self._step.cutter(options, sizes, [self._first(1)]).memory_model

    def _first(self, number: int) -> Microbatch:
        return first_samples(self._step.batch, number, self._options.batches.batch_dim)

    def _recording(self, layout: Layout) -> RecordedModel:
        has_policy = policy_of(layout.activation_checkpointing) is not None
        recordings = self._recordings(layout.microbatch_size, has_policy, layout.num_tensor_ranks)
        return recordings.of(layout.num_stages, layout.activation_checkpointing)

    def _make_recordings(self, num_samples: int, has_policy: bool, num_tensor_ranks: int) -> Recordings:
        value = self._options.activation_checkpointing if has_policy else False
        options = replace(self._options, activation_checkpointing=value)
        whole = None if num_tensor_ranks == 1 else self._recordings(num_samples, has_policy, 1)
        first = self._first_sizes.setdefault(has_policy, num_samples)  # which the others are like
        like = None if num_samples == first else self._recordings(first, has_policy, num_tensor_ranks)
        return Recordings(self._step, options, self._first(num_samples), num_tensor_ranks, whole, like)
