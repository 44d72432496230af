"""The callback that logs times, memory and communication of each stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pp.callbacks._lightning_private import accumulates, logged_step
from lightning_pp.callbacks.monitor.in_trainer import BarNumbers, LoaderWait
from lightning_pp.callbacks.monitor.logger_outputs import LoggerOutputs
from lightning_pp.callbacks.monitor.run_facts import known_peak_tflops, run_facts
from lightning_pp.callbacks.monitor.timelines import write_timeline
from lightning_pp.callbacks.pipeline import LoggedPipeline, pipeline_of
from lightning_pp.callbacks.wandb_logger import PipelineWandbLogger
from lightning_pp.errors import ConfigurationError
from lightning_pp.telemetry import RecordedStep
from lightning_pp.telemetry.diagnosis.collection import StepWindow
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis
from lightning_pp.telemetry.measurement import FitMeasurement
from lightning_pp.telemetry.report import PipelineReport
from lightning_pp.telemetry.timeline.step import Timeline


class PipelineMonitor(Callback):
    """Logs times, bubbles, waits and memory of every stage to the trainer's loggers.

    A fit::

        start: log the values chosen for "auto", the units of each stage, the compared schedules
        every_n_steps optimizer steps: one gather of a few numbers to rank 0 of the pipeline, which logs
            pp/{name}/stage_{s} for each stage (telemetry.STAGE_METRICS): times, waits, bytes, memory, gradients
            pp/{name} for the pipeline (telemetry.PIPELINE_METRICS): step time, bubble, throughput, FLOP/s, ...
            and shows the loss, tokens/s and bubble in the progress bar
        the first of these, the second, fourth, eighth, ...: to W&B also a chart and a table over the stages
        after 8, 16 and 32 measured steps: gather their times; print, once, changes that would shorten a step (findings)
        timeline_every_n_steps optimizer steps: gather the times of this step; write its timeline, planned and
            measured, to a file and to W&B
        end: the same once more; make the report, with the findings of the latest steps

    Between loggings a batch costs no collective. Times are those of the first replica's pipeline. Throughput and mean
    losses are those of all replicas. If a logger raises, a warning says so once and the fit continues. Without a
    ``PipelineParallelStrategy``, or with one stage on one device, the callback only warns.

    Args:
        every_n_steps: Optimizer steps between loggings. None: ``Trainer(log_every_n_steps=)``.
        log_timeline: Whether to write a timeline of the last step, at least at the end of a fit.
        timeline_every_n_steps: Optimizer steps between timelines. None: only at the end.
        timeline_dirpath: Folder of ``timeline.html`` and ``timeline.json``. None: ``timelines`` in the folder of the
            trainer's first logger that has one. Without such a logger no files are written.
        peak_tflops: Peak of one device in TFLOP/s, for ``pp/model_flops_utilization``. None: Lightning's figure for the
            GPU and precision; without one the metric is not logged.

    Attributes:
        report: The measurements of a fit, on global rank 0 after its end; None before that and on other ranks.

    Raises:
        ConfigurationError: ``every_n_steps`` or ``timeline_every_n_steps`` is less than 1, or ``peak_tflops`` is not
            positive.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        log_timeline: bool = True,
        timeline_every_n_steps: int | None = None,
        timeline_dirpath: str | Path | None = None,
        peak_tflops: float | None = None,
    ) -> None:
        intervals = {
            "every_n_steps": (every_n_steps, "the trainer's log_every_n_steps"),
            "timeline_every_n_steps": (timeline_every_n_steps, "the end of the fit only"),
        }
        for name, (number, otherwise) in intervals.items():
            if number is not None and number < 1:
                raise ConfigurationError(
                    f"PipelineMonitor({name}={number}) must be at least 1, or None for {otherwise}."
                )
        if peak_tflops is not None and not peak_tflops > 0:
            raise ConfigurationError(f"PipelineMonitor(peak_tflops={peak_tflops}) must be positive, or None.")
        self.every_n_steps = every_n_steps
        self.peak_tflops = peak_tflops
        self.log_timeline = log_timeline
        self.timeline_every_n_steps = timeline_every_n_steps
        self.timeline_dirpath = timeline_dirpath
        self._num_logged = 0
        self.report: PipelineReport | None = None
        self._measurement: FitMeasurement | None = None
        self._window: StepWindow | None = None
        self._has_told = False
        self._wait: LoaderWait | None = None
        self._bar: BarNumbers | None = None
        self._outputs = LoggerOutputs([])
        self._has_warned = False
        self._schedule: int | str | bool = ""
        self._peak_tflops: float | None = None
        self._seen_before = {"samples": 0, "tokens": 0}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the plan; every rank has to call it."""
        self.report = None
        self._num_logged = 0
        self._measurement = None
        pipeline = pipeline_of(trainer)
        if pipeline is None:
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(f"PipelineMonitor measures nothing, {_why_none(trainer)}, or remove the callback.")
        else:
            self._measurement = FitMeasurement(pipeline)
            self._peak_tflops = self.peak_tflops or known_peak_tflops(pipeline.device, trainer)
            if trainer.is_global_zero:
                self._bar = BarNumbers(trainer)
                self._outputs = LoggerOutputs(trainer.loggers)
                self._log_plan(pipeline, self._measurement, logged_step(trainer))
            for logger in trainer.loggers:
                if isinstance(logger, PipelineWandbLogger):
                    logger.watch_this_node(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock, after the sanity check."""
        if self._measurement is not None:
            self._measurement.clock.restart()
            self._window = StepWindow(trainer.strategy.engine)  # type: ignore[attr-defined] # of a pipeline's strategy
            self._has_told = False
            self._wait = LoaderWait(trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Measures the gradients if this update is to be logged."""
        if self._measurement is not None and self._is_time_to_log(trainer):
            self._measurement.note_gradients()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Records the batch; when due, gathers and logs."""
        measurement = self._measurement
        if measurement is None:
            return
        waited_ms = self._wait.take_ms() if self._wait is not None else 0.0
        loss = _loss_of(outputs, trainer)
        step_ms = measurement.batch_ended(batch, loss, waited_ms, logged_step(trainer))
        if self._is_time_to_log(trainer) and measurement.is_warm:
            found = measurement.collect()
            if found is not None:
                metrics = {**found.metrics(self._peak_tflops), **self._of_training(trainer, measurement)}
                self._outputs.log_metrics(metrics, logged_step(trainer))
                self._num_logged += 1
                if self._num_logged & (self._num_logged - 1) == 0:  # a power of two: tables are files
                    self._outputs.log_stages(found.stage_times(), logged_step(trainer))
                if self._bar is not None:
                    self._bar.show(metrics, loss)
                pipeline = pipeline_of(trainer)
                if pipeline is not None:
                    self._log_changed_plan(pipeline, logged_step(trainer))
        if self.log_timeline and self._is_time(trainer, self.timeline_every_n_steps or 0):
            self._write_timeline(trainer, measurement, measurement.gather_timeline())
        if self._window is not None:
            self._window.batch_ended(step_ms, waited_ms)
            if self._window.is_due:
                self._tell(self._diagnose(self._window, trainer), trainer)

    def _of_training(self, trainer: pl.Trainer, measurement: FitMeasurement) -> dict[str, float]:
        """Numbers of the trainer and the batches."""
        found = {f"pp/{name}": float(number) for name, number in self._seen(measurement).items() if number}
        if trainer.optimizers:
            found["pp/learning_rate"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Samples and tokens trained so far; correct on global rank 0."""
        return {"seen": self._seen(self._measurement)}

    def _seen(self, measurement: FitMeasurement | None) -> dict[str, int]:
        """Samples and tokens of all replicas, including those before this fit."""
        now = (0, 0) if measurement is None else (measurement.num_samples, measurement.num_tokens)
        return {name: self._seen_before[name] + number for name, number in zip(("samples", "tokens"), now, strict=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the counts."""
        self._seen_before = dict(state_dict["seen"])

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pauses the clock."""
        if self._measurement is not None:
            self._measurement.clock.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resumes the clock."""
        if self._measurement is not None:
            self._measurement.clock.resume()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the report and writes the last timelines."""
        measurement, self._measurement = self._measurement, None
        if measurement is None:
            return
        self._restore_trainer()
        window, self._window = self._window, None
        found = self._diagnose(window, trainer) if window is not None else None
        self._seen_before = self._seen(measurement)
        self.report = measurement.finish()
        if self.report is not None:
            if self.log_timeline:
                self._write_timeline(trainer, measurement, self.report.timeline, is_last=True)
            self.report.diagnosis = found
            self._outputs.log_stages(self.report.stages, logged_step(trainer))
        self._log_diagnosis(found, trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restores the trainer."""
        self._window = None
        self._restore_trainer()

    def _restore_trainer(self) -> None:
        """Ends the changes of the trainer's progress bar and profiler."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.end()
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ends the loggers' processes on other nodes."""
        for logger in trainer.loggers:
            if isinstance(logger, PipelineWandbLogger):
                logger.leave_node()

    def _log_plan(self, pipeline: LoggedPipeline, measurement: FitMeasurement, step: int) -> None:
        facts = pipeline.facts()
        self._schedule = facts["schedule"]
        predictions = pipeline.predictions() if self._outputs.shows_tables else []
        self._outputs.log_plan({**facts, **run_facts()}, measurement.stages(), predictions, step)

    def _log_changed_plan(self, pipeline: LoggedPipeline, step: int) -> None:
        """Logs the schedule after the search by measured costs."""
        facts = pipeline.facts()
        if facts["schedule"] == self._schedule:
            return
        self._schedule = facts["schedule"]
        self._outputs.log_facts({f"pp/{name}": facts[name] for name in ("schedule", "costs_from")})
        if self._outputs.shows_tables:
            self._outputs.log_predictions(pipeline.predictions(), step)

    def _diagnose(self, window: StepWindow, trainer: pl.Trainer) -> Diagnosis | None:
        """The diagnosis of the latest steps, on rank 0 of the first pipeline; every rank must call this.

        A failed diagnosis is only a warning; it fails on rank 0, after the gather.
        """
        num_workers = getattr(trainer.train_dataloader, "num_workers", None)
        try:
            return window.diagnose(num_workers if isinstance(num_workers, int) else None)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            rank_zero_warn(f"The diagnosis failed with {type(error).__name__}: {error}. Training continues.")
            return None

    def _tell(self, diagnosis: Diagnosis | None, trainer: pl.Trainer) -> None:
        """Prints and logs the first diagnosis with findings, once in a fit."""
        if diagnosis is not None and diagnosis.findings and not self._has_told:
            self._has_told = True
            rank_zero_info(diagnosis.text)
            self._log_diagnosis(diagnosis, trainer)

    def _log_diagnosis(self, diagnosis: Diagnosis | None, trainer: pl.Trainer) -> None:
        if diagnosis is not None and trainer.is_global_zero:
            self._outputs.log_diagnosis(diagnosis, logged_step(trainer))

    def _write_timeline(
        self, trainer: pl.Trainer, measurement: FitMeasurement, found: Timeline | None, *, is_last: bool = False
    ) -> None:
        if found is not None and trainer.is_global_zero:
            step = RecordedStep.of(measurement.pictured_step, found)
            write_timeline(trainer, step, logged_step(trainer), self.timeline_dirpath, with_trace=is_last)

    def _is_time_to_log(self, trainer: pl.Trainer) -> bool:
        return self._is_time(trainer, self.every_n_steps or trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def _is_time(self, trainer: pl.Trainer, every_n_steps: int) -> bool:
        return every_n_steps > 0 and not accumulates(trainer) and (logged_step(trainer) + 1) % every_n_steps == 0


def _why_none(trainer: pl.Trainer) -> str:
    if getattr(trainer.strategy, "runs_no_batch", False):
        return "because limit_train_batches=0 leaves nothing to measure. Give the trainer batches"
    if getattr(trainer.strategy, "is_plain", False):
        return "because one stage on one device is trained plainly, without a pipeline. Use more devices"
    return (
        f"because the strategy is {type(trainer.strategy).__name__}, not PipelineParallelStrategy. Use "
        "Trainer(strategy='pipeline_parallel')"
    )


def _loss_of(outputs: STEP_OUTPUT, trainer: pl.Trainer) -> Tensor | None:
    """The loss of ``training_step``; Lightning has divided it by the number of accumulated batches."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or trainer.accumulate_grad_batches == 1:
        return loss
    return loss * trainer.accumulate_grad_batches
