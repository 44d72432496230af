"""The numbers of a run, by stage and for the whole pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from lightning_pp.schedule import Placement
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis
from lightning_pp.telemetry.diagnosis.finding import Finding
from lightning_pp.telemetry.metric_table import stage_metric
from lightning_pp.telemetry.reading import RankReading, StepPrediction
from lightning_pp.telemetry.sums import RankSums, imbalance_of, longest_span_bubble
from lightning_pp.telemetry.throughput import Throughput
from lightning_pp.telemetry.timeline.step import Timeline


@dataclass(frozen=True)
class StageTimes:
    """Means of one stage over some steps; :data:`~lightning_pp.telemetry.metric_table.STAGE_METRICS` says what each is.

    ``activations_gib`` is 0 where no step was simulated, and ``gradient_norm`` None if it was not measured.
    """

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    bubble_fraction: float
    p2p_wait_ms: float
    peak_memory_gib: float
    backward_ms: float = 0.0
    sent_bytes: float = 0.0
    memory_allocated_gib: float = 0.0
    memory_reserved_gib: float = 0.0
    activations_gib: float = 0.0
    gather_exposed_ms: float = 0.0
    gather_hidden_ms: float = 0.0
    reduce_exposed_ms: float = 0.0
    reduce_hidden_ms: float = 0.0
    gradient_norm: float | None = None


@dataclass(frozen=True)
class StageInfo:
    """The identity of a stage: its rank, units and parameters.

    Attributes:
        rank: The pipeline rank that holds it.
        units: Its units in the order of their first calls.
        num_parameters: Parameters in them; one that several stages hold counts in each.
    """

    rank: int
    units: list[str]
    num_parameters: int


@dataclass(frozen=True, kw_only=True)
class StageReport(StageTimes):
    """A stage and its means over the run; the first fields are those of :class:`StageInfo`."""

    stage: int
    units: list[str]
    num_parameters: int


@dataclass
class PipelineReport:
    """Measurements of a fit, on the pipeline of global rank 0; the first batch is left out of the means.

    Attributes:
        stages: By stage.
        first_loss: What ``training_step`` returned for the first batch of the fit, mean over the replicas.
        last_loss: The same for the last.
        tokens_per_s: Over all replicas; None if the batches hold no token ids (:func:`count_tokens`).
        samples_per_s: Over all replicas.
        step_ms: Wall time from the end of one training batch to the end of the next, milliseconds.
        bubble_fraction: ``1 - work / longest span`` (:func:`longest_span_bubble`).
        timeline_text: The last step with all its microbatches, drawn for a terminal, with ANSI colours.
        timeline: The same step, to be drawn by :func:`text_timeline`, :func:`html_timeline` and :func:`chrome_trace`.
        diagnosis: What would make the latest steps shorter; None where there were too few of them.
    """

    stages: list[StageReport]
    first_loss: float | None
    last_loss: float | None
    tokens_per_s: float | None
    samples_per_s: float
    step_ms: float
    bubble_fraction: float
    timeline_text: str
    timeline: Timeline
    diagnosis: Diagnosis | None = None

    @property
    def findings(self) -> Sequence[Finding]:
        """Those of the diagnosis, the biggest gain first."""
        return () if self.diagnosis is None else self.diagnosis.findings


@dataclass(frozen=True)
class Measurements:
    """Measurements of all ranks of a pipeline over some steps.

    Attributes:
        placement: Which rank holds which stages.
        ranks: Sums by rank.
        readings: The readings that ranks sent.
        throughput: What went through, over all replicas.
        prediction: What was expected of a step, if anything.
        num_devices: Ranks of all replicas.
    """

    placement: Placement
    ranks: Sequence[RankSums]
    readings: Sequence[RankReading]
    throughput: Throughput
    prediction: StepPrediction | None = None
    num_devices: int = 1

    def __add__(self, other: Measurements) -> Measurements:
        return Measurements(
            self.placement,
            [mine + its for mine, its in zip(self.ranks, other.ranks, strict=True)],
            [mine.merged(its) for mine, its in zip(self.readings, other.readings, strict=True)],
            self.throughput + other.throughput,
            other.prediction,
            other.num_devices,
        )

    @property
    def bubble_fraction(self) -> float:
        """Of the whole pipeline."""
        return longest_span_bubble(self.ranks)

    def stage_times(self) -> list[StageTimes]:
        """Means by stage."""
        return [self._times_of(stage) for stage in range(self.placement.num_stages)]

    def metrics(self, peak_tflops: float | None = None) -> dict[str, float]:
        """The logged metrics: ``pp/{name}/stage_{s}`` for every stage, and ``pp/{name}`` for the pipeline.

        Args:
            peak_tflops: The most that one device can do, TFLOP/s; without it there is no utilisation.
        """
        absent = self._absent()
        metrics = {
            stage_metric(name, stage): value
            for stage, times in enumerate(self.stage_times())
            for name, value in vars(times).items()
            if value is not None and not name.startswith(absent)
        }
        found = {
            f"pp/{name}": value for name, value in self._pipeline_metrics(peak_tflops).items() if value is not None
        }
        return metrics | found

    def _absent(self) -> tuple[str, ...]:
        """How the names of metrics begin that this pipeline cannot have."""
        has_replicas = self.num_devices > self.placement.num_ranks
        gathers = any(stage.gather_exposed_ms + stage.gather_hidden_ms for rank in self.ranks for stage in rank.stages)
        is_there = {
            "p2p_wait_ms": self.placement.num_ranks > 1,
            "sent_bytes": self.placement.num_ranks > 1,
            "activations_gib": self.prediction is not None,
            "memory_reserved_gib": any(r.memory_reserved_gib > r.memory_allocated_gib for r in self.readings),
            "gather_": has_replicas and gathers,
            "reduce_": has_replicas,
        }
        return tuple(name for name, is_so in is_there.items() if not is_so)

    def _pipeline_metrics(self, peak_tflops: float | None) -> dict[str, float | None]:
        through, prediction = self.throughput, self.prediction
        tflops = through.model_flops / through.seconds / self.num_devices / 1e12 if through.seconds else 0.0
        squares = [reading.gradient_square for reading in self.readings]
        waits = [reading.data_wait_ms for reading in self.readings]
        return {
            "step_ms": through.step_ms,
            "bubble_fraction": self.bubble_fraction,
            "imbalance": imbalance_of(self.ranks),
            "predicted_over_measured": prediction.step_ms / through.step_ms if prediction and through.step_ms else None,
            "data_wait_ms": max(waits) / through.num_batches if through.num_batches else 0.0,
            "samples_per_s": through.samples_per_s,
            "tokens_per_s": through.tokens_per_s,
            "tflops_per_device": tflops,
            "model_flops_utilization": tflops / peak_tflops if peak_tflops else None,
            "gradient_norm": sqrt(sum(squares)) if min(squares) >= 0 else None,
        }

    def _times_of(self, stage: int) -> StageTimes:
        rank = self.placement.rank_of_stage[stage]
        sums = self.ranks[rank]
        place = self.placement.stages_of_rank(rank).index(stage)
        of_stage, reading = sums.stages[place], self.readings[rank]
        per_microbatch = 1.0 / of_stage.num_microbatches if of_stage.num_microbatches else 0.0
        per_step = 1.0 / sums.num_steps if sums.num_steps else 0.0
        return StageTimes(
            forward_ms=of_stage.forward_ms * per_microbatch,
            backward_input_ms=of_stage.backward_input_ms * per_microbatch,
            backward_weight_ms=of_stage.backward_weight_ms * per_microbatch,
            bubble_fraction=sums.bubble_fraction,
            p2p_wait_ms=of_stage.wait_ms * per_step,
            peak_memory_gib=reading.peak_memory_gib,
            backward_ms=(of_stage.backward_input_ms + of_stage.backward_weight_ms) * per_microbatch,
            sent_bytes=of_stage.sent_bytes * per_step,
            memory_allocated_gib=reading.memory_allocated_gib,
            memory_reserved_gib=reading.memory_reserved_gib,
            activations_gib=self.prediction.held_gib[rank] if self.prediction is not None else 0.0,
            gather_exposed_ms=of_stage.gather_exposed_ms * per_step,
            gather_hidden_ms=of_stage.gather_hidden_ms * per_step,
            reduce_exposed_ms=of_stage.reduce_exposed_ms * per_step,
            reduce_hidden_ms=of_stage.reduce_hidden_ms * per_step,
            gradient_norm=sqrt(reading.gradient_squares[place]) if reading.gradient_squares else None,
        )
