"""Measuring one fit on every rank of a pipeline."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.gathering import gather
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.schedule import Placement, Schedule
from lightning_pp.sharding.units.collective_times import CollectiveTimes
from lightning_pp.split.cut.partition import Partition
from lightning_pp.telemetry.diagnosis.evidence import PlanFacts
from lightning_pp.telemetry.memory import read_memory_gib, read_peak_memory_gib
from lightning_pp.telemetry.reading import RankReading, StepPrediction
from lightning_pp.telemetry.report import Measurements, PipelineReport, StageInfo, StageReport
from lightning_pp.telemetry.sums import RankSums
from lightning_pp.telemetry.throughput import BatchClock, Throughput, count_tokens
from lightning_pp.telemetry.timeline.step import Timeline
from lightning_pp.telemetry.timeline.text import text_timeline

# How many of the latest steps are read when measurements are collected; the timers of older ones are dropped unread.
_MOST_STEPS_READ = 8
_NUM_WARM_UP_BATCHES = 1


class SplitPipeline(Protocol):
    """Facts of a model that was cut."""

    @property
    def partition(self) -> Partition: ...

    @property
    def num_parameters(self) -> Mapping[str, int]: ...


class MeasurablePipeline(Protocol):
    """The parts of one rank's pipeline that are measured here.

    Attributes:
        rank: This rank's place in the pipeline.
        replica: This pipeline's place among its replicas.
        device: Where this rank computes.
        placement: Which rank holds which stages.
        split: Which units each stage has.
        groups: Who gathers.
        last_training_step: The schedule and the times of the last training batch; a new pair for each.
        last_collectives: The gathers and reductions of that batch; None if not asked for.
        last_num_samples: Samples in that batch.
        last_model_flops: Operations of its forward and backward, over all stages, without what is computed again.
        is_timed: Whether times are taken from the next batch on.
        label: Makes a context around each action of its name, for a profiler; None for none.
        is_settled: Whether the schedule will stay as it is; the same on every rank.
    """

    rank: int
    replica: int
    device: torch.device
    placement: Placement
    last_training_step: tuple[Schedule, StepTimer] | None
    last_collectives: CollectiveTimes | None
    last_num_samples: int
    last_model_flops: float
    is_timed: bool
    label: Callable[[str], AbstractContextManager[Any]] | None

    @property
    def split(self) -> SplitPipeline: ...

    @property
    def groups(self) -> ControlGroups: ...

    @property
    def is_settled(self) -> bool: ...

    def plan_facts(self) -> PlanFacts: ...

    def prediction_of(self, schedule: Schedule) -> StepPrediction: ...

    def gradient_squares(self) -> list[float]: ...


class FitMeasurement:
    """Collects the times of training steps; every rank has one.

    A fit, on every rank of the first replica's pipeline::

        after each batch: keep the step's timer, unread; note wall time, samples, tokens and loss     (no collective)
        note_gradients(): before an update that is to be logged, norms of this rank's gradients       (no collective)
        collect(): read the timers of the latest steps, sum, one gather to rank 0
        finish(): collect what is left; gather one step's times; rank 0 puts the report together

    The other replicas keep their losses, which are averaged in ``finish``, and add their shards' part to the norms of
    gradients in ``collect``.

    The first batch warms up caches and allocators, and is left out unless there is no other.

    Args:
        pipeline: What runs on this rank.

    Attributes:
        clock: Times the batches.
        num_samples: Samples that all replicas have trained on, the first batch included; on pipeline rank 0.
        num_tokens: The same of tokens.
        pictured_step: The optimizer step that :meth:`gather_timeline` shows.
    """

    def __init__(self, pipeline: MeasurablePipeline) -> None:
        self.clock = BatchClock()
        self._waited_ms = 0.0
        self.num_samples = 0
        self.num_tokens = 0
        self._squares: list[float] = []
        self._prediction: tuple[Schedule, StepPrediction] | None = None
        self._pipeline = pipeline
        self._placement = pipeline.placement
        self._stages = pipeline.placement.stages_of_rank(pipeline.rank)
        self._is_measured = pipeline.replica == 0
        pipeline.is_timed = self._is_measured
        self._timers: deque[tuple[StepTimer, CollectiveTimes | None]] = deque(maxlen=_MOST_STEPS_READ)
        self._throughput = Throughput()
        self._total: Measurements | None = None
        self._last_step = pipeline.last_training_step
        self._pictured: tuple[Schedule, StepTimer] | None = None
        self.pictured_step = 0
        self._num_batches = 0
        self._first_loss: Tensor | None = None
        self._last_loss: Tensor | None = None

    # ---------------------------------------------------------------- during the fit

    def batch_ended(self, batch: Any, loss: Tensor | None, waited_ms: float = 0.0, at_step: int = 0) -> float | None:
        """Notes a training batch; costs no collective and does not wait for the device.

        Args:
            batch: The batch.
            loss: What the step returned for it, a scalar.
            waited_ms: How long the loader was waited for, since the batch before.
            at_step: The optimizer step that it belongs to.

        Returns:
            Its wall time, milliseconds; None where nothing was run, in the first batch, and on other replicas.
        """
        self._waited_ms += waited_ms
        step = self._pipeline.last_training_step
        if step is None or step is self._last_step:
            return None  # nothing was run, as for a batch that the loader gave as None
        self._last_step = step
        self._num_batches += 1
        if self._num_batches == 1:
            self._first_loss = loss
        if self._num_batches == _NUM_WARM_UP_BATCHES:
            self._waited_ms = 0.0  # what follows belongs to batches that count
        self._last_loss = loss
        if not self._is_measured:
            return None
        if self._pictured is None or step[0].num_microbatches >= self._pictured[0].num_microbatches:
            self._pictured, self.pictured_step = step, at_step  # not the short last batch of an epoch
        num_tokens = count_tokens(batch) if self._pipeline.rank == 0 else 0
        num_replicas = self._pipeline.groups.num_replicas
        num_samples, num_tokens = self._pipeline.last_num_samples * num_replicas, num_tokens * num_replicas
        throughput = self.clock.batch_ended(num_samples, num_tokens, self._pipeline.last_model_flops * num_replicas)
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        if self._num_batches == _NUM_WARM_UP_BATCHES + 1:
            self._timers.clear()
            self._throughput = Throughput()
        self._timers.append((step[1], self._pipeline.last_collectives))
        self._throughput += throughput
        return throughput.step_ms if self.is_warm else None

    @property
    def is_warm(self) -> bool:
        """Whether there is a batch after the warm-up, the same on every rank."""
        return self._num_batches > _NUM_WARM_UP_BATCHES

    def note_gradients(self) -> None:
        """Takes the norms of this rank's gradients, which are complete; waits for the device."""
        self._squares = self._pipeline.gradient_squares()

    def collect(self) -> Measurements | None:
        """The measurements since the last call; every rank must call it.

        Returns:
            On rank 0 of the first pipeline the measurements, elsewhere None.
        """
        squares, self._squares = self._squares, []
        groups = self._pipeline.groups
        if squares and groups.same_stages is not None:
            over_ranks = torch.tensor(squares, dtype=torch.float64, device="cpu")
            dist.all_reduce(over_ranks, group=groups.same_stages)
            squares = over_ranks.tolist()
        return self._collect(squares) if self._is_measured else None

    def _collect(self, squares: Sequence[float]) -> Measurements | None:
        own = RankSums.none(len(self._stages))
        for timer, collectives in self._timers:
            by_stage = {} if collectives is None else self._by_stage(collectives)
            own += RankSums.of_step(timer.times(), self._stages, timer.sent_bytes, by_stage)
        self._timers.clear()
        groups = self._pipeline.groups
        gathered = gather((self._read(squares), own), groups.pipeline, self._pipeline.rank)
        throughput, self._throughput = self._throughput, Throughput()
        if gathered is None:
            return None
        readings, sums = [reading for reading, _ in gathered], [of_rank for _, of_rank in gathered]
        num_devices = self._placement.num_ranks * groups.num_replicas * groups.num_tensor_ranks
        found = Measurements(self._placement, sums, readings, throughput, self._predict(), num_devices)
        self._total = found if self._total is None else self._total + found
        return found

    def _by_stage(self, collectives: CollectiveTimes) -> dict[int, dict[str, float]]:
        """Sums by stage; times of no particular unit count for the first stage."""
        stage_of_unit = self._pipeline.split.partition.stage_of_unit
        return collectives.sums_by(lambda unit: stage_of_unit.get(unit, self._stages[0]))

    def _read(self, squares: Sequence[float]) -> RankReading:
        device = self._pipeline.device
        waited_ms, self._waited_ms = self._waited_ms, 0.0
        return RankReading(
            read_peak_memory_gib(device),
            *read_memory_gib(device),
            waited_ms,
            squares[0] if squares else -1.0,
            tuple(squares[1:]),
        )

    def _predict(self) -> StepPrediction | None:
        """The prediction for the latest schedule, simulated once."""
        if self._last_step is None:
            return None
        schedule = self._last_step[0]
        if self._prediction is None or self._prediction[0] is not schedule:
            self._prediction = (schedule, self._pipeline.prediction_of(schedule))
        return self._prediction[1]

    # ---------------------------------------------------------------- at the end

    def finish(self) -> PipelineReport | None:
        """The report, on rank 0 of the first pipeline; every rank has to call it.

        Returns:
            None elsewhere, and where no batch was trained.
        """
        if self._num_batches == 0:
            return None
        first_loss, last_loss = self._mean_losses()
        if not self._is_measured:
            return None
        if self._timers:
            self._collect([])
        timeline = self.gather_timeline()
        if timeline is None or self._total is None:
            return None
        total = self._total
        return PipelineReport(
            stages=[
                StageReport(stage=stage, units=info.units, num_parameters=info.num_parameters, **vars(times))
                for stage, (info, times) in enumerate(zip(self.stages(), total.stage_times(), strict=True))
            ],
            first_loss=first_loss,
            last_loss=last_loss,
            tokens_per_s=total.throughput.tokens_per_s,
            samples_per_s=total.throughput.samples_per_s,
            step_ms=total.throughput.step_ms,
            bubble_fraction=total.bubble_fraction,
            timeline_text=text_timeline(timeline, width=min(max(shutil.get_terminal_size((100, 24)).columns, 60), 140)),
            timeline=timeline,
        )

    def stages(self) -> list[StageInfo]:
        """What each stage is."""
        split = self._pipeline.split
        stages = []
        for stage, rank in enumerate(self._placement.rank_of_stage):
            units = split.partition.units_of_stage(stage)
            stages.append(StageInfo(rank, units, sum(split.num_parameters[unit] for unit in units)))
        return stages

    def gather_timeline(self) -> Timeline | None:
        """The last step with all its microbatches, on all ranks, on rank 0; every rank has to call it.

        Returns:
            None elsewhere, and where no batch was trained.
        """
        if self._pictured is None:
            return None
        schedule, timer = self._pictured
        groups = self._pipeline.groups
        beside = timer.sharding_times() if groups.num_replicas > 1 else []  # gathers and reductions over replicas
        ranks = gather((timer.times(), beside), groups.pipeline, self._pipeline.rank)
        return None if ranks is None else Timeline.aligned(schedule, *(list(each) for each in zip(*ranks, strict=True)))

    def _mean_losses(self) -> tuple[float | None, float | None]:
        """The first and the last loss; on pipeline rank 0, where they are reported, means over the replicas."""
        if self._first_loss is None or self._last_loss is None:
            return None, None
        losses = torch.tensor([float(self._first_loss), float(self._last_loss)], dtype=torch.float64, device="cpu")
        groups = self._pipeline.groups
        if self._pipeline.rank == 0 and groups.data_parallel is not None:
            dist.all_reduce(losses, group=groups.data_parallel)
            losses /= groups.num_replicas
        first, last = losses.tolist()
        return first, last
