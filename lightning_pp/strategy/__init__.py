"""The Lightning strategy: the only layer, with the callbacks, that knows Lightning."""

from __future__ import annotations

from lightning_pp.strategy.strategy import PipelineParallelStrategy

__all__ = ["PipelineParallelStrategy"]
