"""Measuring the first batches of a training, and the change to the schedule that is best for what was measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh

from lightning_pp.errors import ScheduleError
from lightning_pp.runtime.link_speed import Link, measure_gather_and_reduce, measure_links
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.schedule import ActionKind, Schedule, Sharding, StageCosts, build_schedule
from lightning_pp.schedule.costs_file import GIB
from lightning_pp.split.microbatch import Microbatch
from lightning_pp.split.plan import StepPlan
from lightning_pp.strategy.assembly import SplitModel
from lightning_pp.strategy.control import ControlGroups
from lightning_pp.strategy.plans import signature_of
from lightning_pp.strategy.schedule_options import ScheduleOptions
from lightning_pp.strategy.schedules import ProgramBook
from lightning_pp.strategy.stage_costs import BYTES_PER_GIB, crossing_bytes, held_gib, with_held
from lightning_pp.strategy.tuning import Layout, compared_schedules, decided_by_one, memory_limit_of

NUM_WARM_UP_BATCHES = 2
"""Left out of the measurement: they fill caches and allocators and make communicators."""
_HELD = "held"

Samples = dict[tuple[int, str], list[float]]
"""Stage and letter of F, I, W (milliseconds) or ``held`` (GiB after I) to what was measured."""


@dataclass
class Profile:
    """What some batches took on the stages of one rank, by the signature of their microbatches.

    Attributes:
        samples: Signature, as text that is the same on all ranks, to measurements.
        num_samples: Signature to its microbatches' number of samples.
        plans: Signature to the plan of its microbatches.
        numbers: How often a batch had how many microbatches.
    """

    samples: dict[str, Samples] = field(default_factory=dict)
    num_samples: dict[str, int] = field(default_factory=dict)
    plans: dict[str, StepPlan] = field(default_factory=dict)
    numbers: Counter[int] = field(default_factory=Counter)

    def add(
        self,
        timer: StepTimer,
        queued_bytes: Mapping[tuple[int, int], int],
        microbatches: Sequence[Microbatch],
        plans: Sequence[StepPlan],
    ) -> None:
        """Adds one batch; on CUDA its timer is read, so the batch should be over."""
        self.numbers[len(microbatches)] += 1
        texts = [str(signature_of(microbatch.data)) for microbatch in microbatches]
        for text, microbatch, plan in zip(texts, microbatches, plans, strict=True):
            self.plans[text] = plan
            self.num_samples[text] = microbatch.num_samples
        for times in timer.times():
            stage, index = times.action.stage, times.action.microbatch
            if index is not None and times.action.kind in (ActionKind.F, ActionKind.I, ActionKind.W):
                samples = self.samples.setdefault(texts[index], {})
                samples.setdefault((stage, str(times.action.kind)), []).append(times.work_ms)
        for (stage, index), num_bytes in queued_bytes.items():
            samples = self.samples.setdefault(texts[index], {})
            samples.setdefault((stage, _HELD), []).append(num_bytes / BYTES_PER_GIB)


@dataclass(frozen=True)
class Measured:
    """What the first batches showed; the same on every rank.

    Attributes:
        costs: Of the stages; ``held_*`` in GiB.
        num_microbatches: Of the most frequent batch.
        num_samples: In the microbatches that count, those of the most frequent signature.
        signature: That signature.
    """

    costs: StageCosts
    num_microbatches: int
    num_samples: int
    signature: str


class TunedPrograms:
    """The programs of a training, which it measures and, with ``auto``, replaces once by better ones.

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
        options: What the user asks of the schedule.
        book: The programs.
        split: The split model.
        mesh: The axis ``pipeline``.
        data_parallel: The ranks that hold the same stages.
        groups: Who talks to whom.
        device: Where this rank computes.
        agree: Returns rank 0's argument on every rank.

    Attributes:
        sharding: What the stages gather and reduce; the search compares schedules with it. None: nothing.
    """

    def __init__(
        self,
        options: ScheduleOptions,
        book: ProgramBook,
        split: SplitModel,
        mesh: DeviceMesh,
        data_parallel: DeviceMesh,
        groups: ControlGroups,
        device: torch.device,
        agree: Callable[[Any], Any],
    ) -> None:
        self._options = options
        self._book = book
        self._split = split
        self._pipeline = mesh["pipeline"]
        self._data_parallel = data_parallel
        self._groups = groups
        self._device = device
        self._agree = agree
        self._rank = mesh.get_local_rank("pipeline")
        self._is_first = self._rank == 0 and groups.replica == 0
        self._measures = options.measures
        self._num_batches = 0
        self._noted: list[tuple[StepTimer, dict[tuple[int, int], int], Sequence[Microbatch], Sequence[StepPlan]]] = []
        self.queued_bytes: dict[tuple[int, int], int] | None = None
        self.costs: StageCosts | None = None
        self.sharding: Sharding | None = None

    def training(self, num_microbatches: int) -> Schedule:
        """The schedule of the training batch that is about to be run; every rank asks before every batch."""
        self.queued_bytes = None
        if not self._measures:
            return self._book.training(num_microbatches)
        if self._num_batches >= NUM_WARM_UP_BATCHES + self._options.num_profiled_batches:
            self._measures = False
            self._tune()
            return self._book.training(num_microbatches)
        self.queued_bytes = {}
        return self._book.measured(num_microbatches)

    def evaluation(self, num_microbatches: int) -> Schedule:
        """The schedule of an evaluation batch."""
        return self._book.evaluation(num_microbatches)

    def note(self, timer: StepTimer, microbatches: Sequence[Microbatch], plans: Sequence[StepPlan]) -> None:
        """Keeps what the training batch took that has just been run."""
        if self._measures and self.queued_bytes is not None:
            self._num_batches += 1
            if self._num_batches > NUM_WARM_UP_BATCHES:
                self._noted.append((timer, self.queued_bytes, microbatches, plans))

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
        measured = self._exchange(profile)
        self.costs = measured.costs
        if self._is_first and self._options.save_costs is not None:
            self._save(measured)
        if not self._options.searches or self._options.costs is not None:
            return
        rank_zero_info(
            f"schedule='auto': measured {self._options.num_profiled_batches} batches; rank 0 searches for a schedule "
            f"of {measured.num_microbatches} microbatches on {self._pipeline.size()} ranks, the others wait."
        )
        schedule, report = decided_by_one(lambda: self._search(measured), decides=self._is_first, agree=self._agree)
        if schedule is None:
            rank_zero_warn(report)
        else:
            limit = memory_limit_of(self._options, measured.costs, schedule.placement)
            self._book.use(schedule, measured.costs, limit)
            rank_zero_info(report)

    def _search(self, measured: Measured) -> tuple[Schedule | None, str]:
        """The schedule to go on with, None to leave it, and why."""
        placement, number = self._split.placement, measured.num_microbatches
        limit = memory_limit_of(self._options, measured.costs, placement)
        before = self._book.training(number)
        started = time.perf_counter()
        try:
            found = build_schedule(
                "auto",
                num_ranks=placement.num_ranks,
                num_microbatches=number,
                stages_per_rank=placement.num_stages // placement.num_ranks,
                costs=measured.costs,
                memory_limit=limit,
                exact=self._options.exact_search,
                placement=placement,
                sharding=self.sharding,
            ).validate(costs=measured.costs, memory_limit=limit)
        except ScheduleError as error:
            return None, f"schedule='auto' keeps the schedule that it began with, {before.name}: {error}"
        seconds = time.perf_counter() - started
        return found, "\n".join(
            [
                f"schedule='auto': {found.name} from now on, found in {seconds:.1f} s ({placement.kind}, "
                f"{number} microbatches of {measured.num_samples} samples; only the order of work changes).",
                _costs_text(measured.costs),
                *_comparison(measured, found, before, self._options.memory_limit_gib),
            ]
        )

    def _exchange(self, profile: Profile) -> Measured:
        """The medians of all ranks and replicas, and the times of messages."""
        num_stages = self._split.placement.num_stages
        own = {
            text: {key: (len(values), median(values)) for key, values in samples.items()}
            for text, samples in profile.samples.items()
        }
        in_pipeline: dict[str, dict[tuple[int, str], tuple[int, float]]] = {}
        for part in self._groups.gather_in_pipeline(own):
            for text, medians in part.items():
                in_pipeline.setdefault(text, {}).update(medians)
        everywhere = self._groups.gather((in_pipeline, profile.numbers, profile.num_samples))
        counts: Counter[str] = Counter()
        numbers: Counter[int] = Counter()
        num_samples: dict[str, int] = {}
        for medians_of, numbers_of, num_samples_of in everywhere:
            counts.update({text: medians[0, "F"][0] for text, medians in medians_of.items() if (0, "F") in medians})
            numbers += numbers_of
            num_samples.update(num_samples_of)
        signature = max(counts, key=lambda text: (counts[text], text))

        def over_replicas(stage: int, what: str) -> float:
            found = [
                medians_of[signature][stage, what][1]
                for medians_of, _, _ in everywhere
                if (stage, what) in medians_of.get(signature, {})
            ]
            return median(found) if found else 0.0

        forward, backward_input, backward_weight = (
            [over_replicas(stage, letter) for stage in range(num_stages)] for letter in ("F", "I", "W")
        )
        after_input = [over_replicas(stage, _HELD) for stage in range(num_stages)]
        # a replica that has never seen this signature takes its own for the sizes of messages
        text = signature if signature in profile.plans else max(profile.plans)
        plan = profile.plans[text]
        p2p, gathers, reductions = self._measure_messages(plan)
        costs = StageCosts(forward, backward_input, backward_weight, p2p, gather=gathers, reduce=reductions)
        by_dry_run = held_gib(plan.record, self._split.partition, self._split.placement)[0]
        held = self._groups.gather(by_dry_run if text == signature else None)
        after_forward = next(found for found in held if found is not None)
        return Measured(
            with_held(costs, after_forward, after_input),
            max(numbers, key=lambda number: (numbers[number], number)),
            num_samples[signature],
            signature,
        )

    def _measure_messages(self, plan: StepPlan) -> tuple[list[float], list[float], list[float]]:
        """Milliseconds per stage of messages to its neighbours, of gathers and of reductions; equal on every rank."""
        placement = self._split.placement
        rank_of_stage, num_stages = placement.rank_of_stage, placement.num_stages
        sent = crossing_bytes(plan)
        links = {
            stage: Link(rank_of_stage[stage], rank_of_stage[stage + 1], sent[stage])
            for stage in range(num_stages - 1)
            if rank_of_stage[stage] != rank_of_stage[stage + 1]
        }
        times = measure_links(list(links.values()), self._pipeline.get_group(), self._device)
        own = (
            {stage: times[link] for stage, link in links.items() if link in times},
            {stage: self._measure_collectives(stage) for stage in placement.stages_of_rank(self._rank)},
        )
        after: dict[int, float] = {}
        collectives: dict[int, tuple[float, float]] = {}
        for links_of, collectives_of in self._groups.gather_in_pipeline(own):
            after |= links_of
            collectives |= collectives_of
        replicas = self._groups.gather((after, collectives))

        def mean(values: Sequence[float]) -> float:
            return sum(values) / len(values)

        one_way = [mean([after_of.get(stage, 0.0) for after_of, _ in replicas]) for stage in range(num_stages)]
        # a stage sends values to the next one and gradients to the one before
        p2p = [max(one_way[max(stage - 1, 0)], one_way[stage]) for stage in range(num_stages)]
        gathers = [mean([found[stage][0] for _, found in replicas]) for stage in range(num_stages)]
        reductions = [mean([found[stage][1] for _, found in replicas]) for stage in range(num_stages)]
        return p2p, gathers, reductions

    def _measure_collectives(self, stage: int) -> tuple[float, float]:
        """A gather and a reduction of the stage's parameters over the replicas."""
        if self._data_parallel.size() == 1:
            return 0.0, 0.0
        partition = self._split.partition
        num_parameters = sum(self._split.num_parameters[unit] for unit in partition.units_of_stage(stage))
        itemsize = next((p.dtype.itemsize for p in self._split.module.parameters()), 4)
        return measure_gather_and_reduce(num_parameters * itemsize, self._data_parallel.get_group(), self._device)

    # ---------------------------------------------------------------- what is told

    def _save(self, measured: Measured) -> None:
        path = self._options.save_costs
        assert path is not None
        placement, partition = self._split.placement, self._split.partition
        is_cuda = self._device.type == "cuda"
        try:
            measured.costs.to_json(
                path,
                held_unit=GIB,
                measured_on={
                    "device": torch.cuda.get_device_name(self._device) if is_cuda else self._device.type,
                    "torch": torch.__version__,
                    "num_ranks": placement.num_ranks,
                    "data_parallel_size": self._groups.num_replicas,
                    "rank_of_stage": list(placement.rank_of_stage),
                    "stages": [partition.units_of_stage(stage) for stage in range(placement.num_stages)],
                    "num_microbatches": measured.num_microbatches,
                    "samples_per_microbatch": measured.num_samples,
                    "microbatch": measured.signature,
                    "num_batches": self._options.num_profiled_batches,
                },
            )
        except OSError as error:
            rank_zero_warn(f"The measured costs could not be written to save_costs={str(path)!r}: {error}")
        else:
            rank_zero_info(f"The measured costs of the stages are in {path}.")


def _costs_text(costs: StageCosts) -> str:
    parts = []
    for name, field_name in (("F", "forward"), ("I", "backward_input"), ("W", "backward_weight"), ("p2p", "p2p")):
        values = getattr(costs, field_name)
        parts.append(f"{name} {min(values):.3g} to {max(values):.3g}")
    return f"  measured per stage, ms: {', '.join(parts)}"


def _comparison(measured: Measured, found: Schedule, before: Schedule, limit: float | None) -> list[str]:
    """A line for each schedule: predicted step time and bubble."""
    costs = measured.costs
    compared: list[tuple[str, Schedule | ScheduleError]] = [
        (f"> {found.name}", found),
        (f"  {before.name}, until now", before),
    ]
    by_hand = compared_schedules(costs, found.placement, measured.num_microbatches, limit)
    compared += [(f"  {name}", schedule) for name, schedule in by_hand]
    lines = ["  predicted                       step, ms   bubble   most held, GiB"]
    for name, schedule in compared:
        if isinstance(schedule, ScheduleError):
            lines.append(f"  {name:<30} {schedule}")
            continue
        simulation = schedule.simulate(costs)
        lines.append(
            f"  {name:<30} {max(simulation.span_ms):9.4g} {simulation.longest_span_bubble:8.3f} "
            f"{max(simulation.peak_memory):12.3g}"
        )
    return lines


def tuned_programs(
    options: ScheduleOptions,
    layout: Layout,
    split: SplitModel,
    mesh: DeviceMesh,
    data_parallel: DeviceMesh,
    groups: ControlGroups,
    device: torch.device,
    agree: Callable[[Any], Any],
) -> TunedPrograms:
    """The programs of a model that was cut for ``layout``; the other arguments are those of :class:`TunedPrograms`."""
    is_named = not options.searches and options.from_file is None
    book = ProgramBook(
        options.name,
        layout.placement,
        layout.costs,
        memory_limit_of(options, layout.costs, layout.placement),
        basis=None if is_named else layout.start,
    )
    if layout.reason:
        how = "given" if options.costs is not None else "estimated"
        rank_zero_info(f"schedule='auto' begins with {layout.start.name}, by {how} costs:\n{layout.reason}")
    programs = TunedPrograms(options, book, split, mesh, data_parallel, groups, device, agree)
    if options.costs is not None:
        programs.costs = layout.costs  # of these cuts, and with the bytes that were not given
    return programs
