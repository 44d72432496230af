"""Lightning callbacks, and a logger."""

from __future__ import annotations

from lightning_pp.callbacks.monitor.pipeline_monitor import PipelineMonitor
from lightning_pp.callbacks.prediction_writer import PredictionWriter, read_predictions
from lightning_pp.callbacks.profiling.memory_snapshots import MemorySnapshots
from lightning_pp.callbacks.profiling.profiler import PipelineProfiler
from lightning_pp.callbacks.wandb_logger import PipelineWandbLogger

__all__ = [
    "MemorySnapshots",
    "PipelineMonitor",
    "PipelineProfiler",
    "PipelineWandbLogger",
    "PredictionWriter",
    "read_predictions",
]
