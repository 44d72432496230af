"""The pipeline that runs under a trainer, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import lightning.pytorch as pl

from lightning_pp.planning.schedules.predictions import Prediction
from lightning_pp.telemetry.measurement import MeasurablePipeline


class LoggedPipeline(MeasurablePipeline, Protocol):
    """A pipeline that can also report how it was planned."""

    def facts(self) -> dict[str, int | str | bool]: ...

    def predictions(self) -> list[Prediction]: ...


def pipeline_of(trainer: pl.Trainer) -> LoggedPipeline | None:
    """What runs the pipeline on this rank, or None without one; known by what the strategy offers."""
    strategy: Any = trainer.strategy
    # looked up in the class, since the property raises before the pipeline is built
    if not hasattr(type(strategy), "engine") or strategy.is_plain or strategy.runs_no_batch:
        return None
    engine: LoggedPipeline = strategy.engine
    return engine


def set_label(trainer: pl.Trainer, label: Callable[[str], AbstractContextManager[Any]] | None) -> None:
    """Has the actions of the pipeline run within contexts of their names from the next batch on; None: no longer."""
    pipeline = pipeline_of(trainer)
    if pipeline is not None:
        pipeline.label = label
