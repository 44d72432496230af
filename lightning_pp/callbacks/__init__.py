"""Lightning callbacks."""

from __future__ import annotations

from lightning_pp.callbacks.pipeline_monitor import PipelineMonitor

__all__ = ["PipelineMonitor"]
