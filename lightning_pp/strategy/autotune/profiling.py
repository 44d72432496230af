"""Measures the first batches of a training, and changes to the best schedule for the measured costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.errors import ScheduleError
from lightning_pp.long_tasks import LongTask
from lightning_pp.planning.schedules.predictions import Prediction, step_time
from lightning_pp.planning.schedules.programs import ProgramCache
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.planning.tuning import Layout
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.schedule import Schedule, Sharding, StageCosts
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.strategy.autotune.measured_costs import CostExchange, Measured, Profile, signature_text
from lightning_pp.strategy.autotune.tuning_report import (
    about_copies,
    comparison,
    costs_text,
    predicted_schedules,
    save_costs,
)
from lightning_pp.strategy.surroundings import Surroundings
from lightning_pp.telemetry.reading import StepPrediction

NUM_WARM_UP_BATCHES = 2
"""Left out of the measurement: they fill caches and allocators and make communicators."""


class TunedPrograms:
    """The programs of a training, which are measured and replaced once by better ones.

    With ``auto`` another order may be better; with ``activation_offload`` copies may be made at other times.

    A training, on every rank::

        2 batches: warm up
        num_profiled_batches batches: every B as I and W; keep the timers, unread                     (no collective)
        before the next batch: read the timers; exchange medians over the pipeline and the replicas; time messages
            rank 0 searches, with the measured costs, on the placement that the model is cut for; the others wait
            rank 0 broadcasts what it found; every rank uses it from this batch on

    Only the order of actions changes, so the results of no batch do. Costs are those of the most frequent signature of
    microbatches: with lengths that vary, the schedule is the best for the most frequent length. If the search fails, as
    when measured bytes leave no schedule within the memory limit, training goes on as it began, with a warning.

    Args:
        given: Where the pipeline runs, and what the user asks of the schedule.
        layout: What the model was cut for, and the first schedule.
        split: The split model.
        groups: Who talks to whom.
        compute_on_rank0: Returns on every rank what its argument returns on rank 0.

    Attributes:
        cache: The schedules as things stand.
        measures: Whether it needs the times of training batches.
        sharding: What the stages gather and reduce; the search compares schedules with it. None: nothing.
    """

    def __init__(
        self,
        given: Surroundings,
        layout: Layout,
        split: SplitModel,
        groups: ControlGroups,
        compute_on_rank0: Callable[[Callable[[], Any]], Any],
    ) -> None:
        options = self._options = given.options.schedule
        self._rejected = layout.rejected
        self.cache = ProgramCache(
            options.source,
            layout.placement,
            layout.costs,
            options.memory_limit(layout.costs, layout.placement, layout.room_gib),
            found=layout.start if options.source.is_searched else None,
        )
        self._split = split
        self._groups = groups
        self._device = given.device
        self._compute_on_rank0 = compute_on_rank0
        self._room_gib = layout.room_gib
        self._exchange = CostExchange(given, split, groups)
        self._asked = f"schedule={options.source.name!r}"
        self._tells_order = options.whole_batch_loss
        self._is_first = given.mesh.get_rank() == 0
        self.measures = options.measures
        self._num_batches = 0
        # what Profile.add takes, without data, which would take memory until the end of the measurement
        self._noted: list[tuple[StepTimer, dict[tuple[int, int], int], list[str], list[int], Sequence[StepPlan]]] = []
        self.queued_bytes: dict[tuple[int, int], int] | None = None
        # given ones are of these cuts, and with the bytes that were not given
        self.costs: StageCosts | None = None if options.costs is None else layout.costs
        self.sharding: Sharding | None = None
        if layout.reason:
            how = "estimated" if options.costs is None else "given"
            rank_zero_info(f"{self._asked} begins with {layout.start.name}, chosen by {how} costs:\n{layout.reason}")

    def next_training_schedule(self, num_microbatches: int) -> Schedule:
        """The schedule of the training batch that is about to be run; every rank asks before every batch."""
        self.queued_bytes = None
        if self._tells_order:
            self._tells_order = False
            rank_zero_info(self._options.whole_batch_text(self.cache.training(num_microbatches)))
        if not self.measures:
            return self.cache.training(num_microbatches)
        if self._num_batches >= NUM_WARM_UP_BATCHES + self._options.num_profiled_batches:
            self.measures = False
            self._tune()
            return self.cache.training(num_microbatches)
        self.queued_bytes = {}
        return self.cache.measured(num_microbatches)

    def predictions(self, num_microbatches: int) -> list[Prediction]:
        """The schedule that is run, and those in whose place it is, by the costs that it was chosen by."""
        found = predicted_schedules(self.cache.costs, self.cache.training(num_microbatches), self._options)
        return [*found, *(self._rejected if self.costs_from != "measured" else ())]

    def prediction_of(self, schedule: Schedule) -> StepPrediction:
        """The time of a step in a row of overlapping ones, and what ranks hold, by the same costs."""
        costs = self.cache.costs
        held = schedule.simulate(costs).peak_memory
        return StepPrediction(step_time(schedule, costs), tuple(map(float, held)))

    @property
    def costs_from(self) -> str:
        """Where these costs are from: ``estimated``, ``given`` or ``measured``."""
        if self._options.costs is not None:
            return "given"
        return "measured" if self.costs is not None and self._options.searches_again else "estimated"

    def note(self, timer: StepTimer, microbatches: Sequence[Microbatch], plans: Sequence[StepPlan]) -> None:
        """Keeps what the training batch took that has just been run."""
        if self.measures and self.queued_bytes is not None:
            self._num_batches += 1
            if self._num_batches > NUM_WARM_UP_BATCHES:
                num_samples = [microbatch.num_samples for microbatch in microbatches]
                texts = list(map(signature_text, microbatches))
                self._noted.append((timer, self.queued_bytes, texts, num_samples, plans))

    def start_over(self) -> None:
        """After a step that failed: ranks may have run different numbers of batches, so counting starts again."""
        self._num_batches = 0
        self._noted.clear()

    # ---------------------------------------------------------------- between two batches

    def _tune(self) -> None:
        profile = Profile()
        for batch in self._noted:
            profile.add(*batch)
        self._noted.clear()
        measured, before = self._exchange.exchange(profile), self.cache.costs
        copies = self._exchange.measure_copies(before)
        costs = replace(measured.costs, offload=copies, held_on_host=before.held_on_host)
        measured = replace(measured, costs=costs)
        self.costs = measured.costs
        if self._is_first and self._options.save_costs is not None:
            save_costs(self._options, measured, self._split, self._device, self._groups.num_replicas)
        if not self._options.searches_again:
            return
        is_searched = self._options.source.is_searched
        what = "searches for a schedule" if is_searched else "places the copies to the host"
        rank_zero_info(
            f"{self._asked}: measured {self._options.num_profiled_batches} batches. Rank 0 now {what} of "
            f"{measured.num_microbatches} microbatches on {self._split.placement.num_ranks} ranks. The others wait."
        )
        schedule, report = self._compute_on_rank0(lambda: self._search(measured))
        if schedule is None:
            rank_zero_warn(report)
        else:
            limit = self._options.memory_limit(measured.costs, schedule.placement, self._room_gib)
            found = schedule if is_searched else None
            self.cache = replace(self.cache, found=found, costs=measured.costs, memory_limit=limit)
            rank_zero_info(report)

    def _search(self, measured: Measured) -> tuple[Schedule | None, str]:
        """The new schedule, or None to keep the old one, and why."""
        placement, number = self._split.placement, measured.num_microbatches
        limit = self._options.memory_limit(measured.costs, placement, self._room_gib)
        before = self.cache.training(number)
        started = time.perf_counter()
        try:
            with LongTask("The search for a schedule", rank_zero_info):
                found = self._options.source.program(placement, number, measured.costs, limit, sharding=self.sharding)
        except ScheduleError as error:
            return None, f"{self._asked} keeps the schedule that it began with, {before.name}: {error}"
        seconds = time.perf_counter() - started
        if not self._options.source.is_searched:
            return found, f"{about_copies(self._asked, before, found)}\n{costs_text(measured.costs)}"
        return found, "\n".join(
            [
                f"{self._asked}: {found.name} from now on, found in {seconds:.1f} s ({placement.kind}, "
                f"{number} microbatches of {measured.num_samples} samples; only the order of work changes).",
                costs_text(measured.costs),
                *comparison(measured, found, before, self._options),
            ]
        )
