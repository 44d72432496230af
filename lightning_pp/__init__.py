"""Trains an unmodified LightningModule as a pipeline of FSDP2-sharded stages.

Importing the package registers ``Trainer(strategy="pipeline_parallel")``. Without Lightning or torch
:mod:`lightning_pp.schedule` works, and nothing else.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = [
    "BatchPart",
    "CombinedOptimizer",
    "MemorySnapshots",
    "PipelineMonitor",
    "PipelineParallelStrategy",
    "PipelineProfiler",
    "PipelineWandbLogger",
    "verify",
]

try:
    from lightning.pytorch.strategies import StrategyRegistry
except ModuleNotFoundError:
    pass
else:
    from lightning_pp.callbacks import MemorySnapshots, PipelineMonitor, PipelineProfiler, PipelineWandbLogger
    from lightning_pp.combined_optimizer import CombinedOptimizer
    from lightning_pp.split import BatchPart
    from lightning_pp.strategy import PipelineParallelStrategy
    from lightning_pp.verification import verify

    StrategyRegistry.register(
        "pipeline_parallel",
        PipelineParallelStrategy,
        description="Pipeline of FSDP2-sharded stages, split from any module",
        override=True,
    )
