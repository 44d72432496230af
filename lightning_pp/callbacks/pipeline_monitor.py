"""The callback that logs what each stage of a pipeline does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pp.callbacks._lightning_private import accumulates, logged_step
from lightning_pp.callbacks.diagnosis import FitDiagnosis
from lightning_pp.callbacks.logger_outputs import LoggerOutputs
from lightning_pp.callbacks.pipeline import pipeline_of
from lightning_pp.callbacks.timelines import FitTimelines
from lightning_pp.errors import ConfigurationError
from lightning_pp.telemetry import FitMeasurement, PipelineReport


class PipelineMonitor(Callback):
    """Logs times, bubbles, waits and memory of every stage, through whatever loggers the trainer has.

    A fit::

        start: log which units are on which stage
        every_n_steps optimizer steps: one gather of a few numbers to rank 0 of the pipeline, which logs
            pp_stage_{s}/forward_ms, backward_input_ms, backward_weight_ms
            pp_stage_{s}/bubble_fraction, p2p_wait_ms, peak_memory_gib
            pp/step_ms, pp/bubble_fraction, and pp/tokens_per_s (pp/samples_per_s without token ids)
        after 8, 16 and 32 measured steps: gather their times; tell, once, what would make a step shorter (findings)
        timeline_every_n_steps optimizer steps: gather the times of this step and of the slowest since the last; write
            timelines, planned beside measured, to files, W&B and TensorBoard
        end: the same once more; make the report, with the findings of the latest steps

    In between a batch costs no collective. The numbers are those of the first replica's pipeline; throughput is that
    of all replicas, and losses are means over them. A logger that raises ends nothing: it is told once, in a warning.
    Without a ``PipelineParallelStrategy``, or with one stage on one device, the callback does nothing but warn.

    Args:
        every_n_steps: How often to log, in optimizer steps; None for ``Trainer(log_every_n_steps=)``.
        log_timeline: Whether to write timelines, at least at the end of a fit: of the last step and of the slowest.
        timeline_every_n_steps: How often to write them, in optimizer steps; None for the end only.
        timeline_dirpath: Folder of ``timeline.html`` and ``timeline.json``; None for ``timelines`` in the folder of
            the trainer's first logger that has one, and no files where none has.

    Attributes:
        report: What was measured, on global rank 0 once a fit has ended; None before that and elsewhere.

    Raises:
        ConfigurationError: ``every_n_steps`` or ``timeline_every_n_steps`` is less than 1.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        log_timeline: bool = True,
        timeline_every_n_steps: int | None = None,
        timeline_dirpath: str | Path | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(
                f"PipelineMonitor(every_n_steps={every_n_steps}) must be at least 1, or None for the trainer's "
                "log_every_n_steps."
            )
        if timeline_every_n_steps is not None and timeline_every_n_steps < 1:
            raise ConfigurationError(
                f"PipelineMonitor(timeline_every_n_steps={timeline_every_n_steps}) must be at least 1, or None for the "
                "end of the fit only."
            )
        self.every_n_steps = every_n_steps
        self.log_timeline = log_timeline
        self.timeline_every_n_steps = timeline_every_n_steps
        self.timeline_dirpath = timeline_dirpath
        self.report: PipelineReport | None = None
        self._measurement: FitMeasurement | None = None
        self._timelines: FitTimelines | None = None
        self._diagnosis: FitDiagnosis | None = None
        self._outputs = LoggerOutputs([])
        self._has_warned = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the table of stages."""
        self.report = None
        self._measurement = self._timelines = None
        pipeline = pipeline_of(trainer)
        if pipeline is None:
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(f"PipelineMonitor measures nothing, {_why_none(trainer)}, or remove the callback.")
        else:
            self._measurement = FitMeasurement(pipeline)
            if self.log_timeline:
                self._timelines = FitTimelines(trainer, pipeline, self.timeline_every_n_steps, self.timeline_dirpath)
            if trainer.is_global_zero:
                self._outputs = LoggerOutputs(trainer.loggers)
                self._outputs.log_stages(self._measurement.stages(), logged_step(trainer))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock, the sanity check being over."""
        if self._measurement is not None:
            self._measurement.clock.restart()
            self._diagnosis = FitDiagnosis(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Notes the batch; when it is time, gathers and logs."""
        measurement = self._measurement
        if measurement is None:
            return
        measurement.batch_ended(batch, _loss_of(outputs, trainer))
        if self._is_time(trainer) and measurement.is_warm:
            found = measurement.collect()
            if found is not None:
                self._outputs.log_metrics(found.metrics(), logged_step(trainer))
        if self._timelines is not None:
            self._timelines.batch_ended(logged_step(trainer), is_update=not accumulates(trainer))
        if self._diagnosis is not None:
            self._diagnosis.batch_ended()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What follows does not count as training time."""
        if self._measurement is not None:
            self._measurement.clock.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training goes on."""
        if self._measurement is not None:
            self._measurement.clock.resume()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the report and writes the last timelines."""
        measurement, self._measurement = self._measurement, None
        if measurement is None:
            return
        diagnosis, self._diagnosis = self._diagnosis, None
        found = diagnosis.finish() if diagnosis is not None else None
        self.report = measurement.finish()
        if self._timelines is not None:
            self._timelines.finish(logged_step(trainer))
        if self.report is not None:
            self.report.diagnosis = found

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves the trainer as it was."""
        diagnosis, self._diagnosis = self._diagnosis, None
        if diagnosis is not None:
            diagnosis.end()

    def _is_time(self, trainer: pl.Trainer) -> bool:
        every_n_steps = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined] # set by a connector
        if every_n_steps == 0 or accumulates(trainer):
            return False
        return (logged_step(trainer) + 1) % every_n_steps == 0


def _why_none(trainer: pl.Trainer) -> str:
    if getattr(trainer.strategy, "is_plain", False):
        return "because one stage on one device is trained plainly, without a pipeline. Use more devices"
    return (
        f"because the strategy is {type(trainer.strategy).__name__}, not PipelineParallelStrategy. Use "
        "Trainer(strategy='pipeline_parallel')"
    )


def _loss_of(outputs: STEP_OUTPUT, trainer: pl.Trainer) -> Tensor | None:
    """What ``training_step`` returned, which Lightning has divided by the number of accumulated batches."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or trainer.accumulate_grad_batches == 1:
        return loss
    return loss * trainer.accumulate_grad_batches
