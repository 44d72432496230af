"""The pipeline of a trainer, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import lightning.pytorch as pl

from lightning_pp.planning.schedules.predictions import Prediction
from lightning_pp.telemetry.measurement import MeasurablePipeline


class LoggedPipeline(MeasurablePipeline, Protocol):
    """A pipeline that also reports its plan."""

    def facts(self) -> dict[str, int | str | bool]: ...

    def predictions(self) -> list[Prediction]: ...


def pipeline_of(trainer: pl.Trainer) -> LoggedPipeline | None:
    """This rank's engine, or None without a pipeline."""
    strategy: Any = trainer.strategy
    # looked up in the class, since the property raises before the pipeline is built
    if not hasattr(type(strategy), "engine") or strategy.is_plain or strategy.runs_no_batch:
        return None
    engine: LoggedPipeline = strategy.engine
    return engine


def set_label(trainer: pl.Trainer, label: Callable[[str], AbstractContextManager[Any]] | None) -> None:
    """From the next batch on, runs each action within a context with its name; None ends this."""
    pipeline = pipeline_of(trainer)
    if pipeline is not None:
        pipeline.label = label
