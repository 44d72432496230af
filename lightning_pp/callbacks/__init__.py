"""Lightning callbacks."""

from __future__ import annotations

from lightning_pp.callbacks.pipeline_monitor import PipelineMonitor
from lightning_pp.callbacks.profiling.memory_snapshots import MemorySnapshots
from lightning_pp.callbacks.profiling.profiler import PipelineProfiler

__all__ = ["MemorySnapshots", "PipelineMonitor", "PipelineProfiler"]
