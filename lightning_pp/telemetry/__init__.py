"""From the times of actions to numbers per stage and pictures of a step. Knows the plan and torch, not Lightning."""

from __future__ import annotations

from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis
from lightning_pp.telemetry.diagnosis.finding import Finding
from lightning_pp.telemetry.measurement import FitMeasurement, MeasurablePipeline
from lightning_pp.telemetry.memory import read_memory_gib, read_peak_memory_gib
from lightning_pp.telemetry.metric_table import PIPELINE_METRICS, STAGE_METRICS
from lightning_pp.telemetry.reading import RankReading, StepPrediction
from lightning_pp.telemetry.report import Measurements, PipelineReport, StageInfo, StageReport, StageTimes
from lightning_pp.telemetry.sums import RankSums, StageSums, longest_span_bubble
from lightning_pp.telemetry.throughput import BatchClock, Throughput, count_tokens
from lightning_pp.telemetry.timeline.html import html_timeline
from lightning_pp.telemetry.timeline.recorded import RecordedStep
from lightning_pp.telemetry.timeline.step import Timeline
from lightning_pp.telemetry.timeline.text import text_timeline
from lightning_pp.telemetry.timeline.trace import chrome_trace

__all__ = [
    "PIPELINE_METRICS",
    "STAGE_METRICS",
    "BatchClock",
    "Diagnosis",
    "Finding",
    "FitMeasurement",
    "MeasurablePipeline",
    "Measurements",
    "PipelineReport",
    "RankReading",
    "RankSums",
    "RecordedStep",
    "StageInfo",
    "StageReport",
    "StageSums",
    "StageTimes",
    "StepPrediction",
    "Throughput",
    "Timeline",
    "chrome_trace",
    "count_tokens",
    "html_timeline",
    "longest_span_bubble",
    "read_memory_gib",
    "read_peak_memory_gib",
    "text_timeline",
]
