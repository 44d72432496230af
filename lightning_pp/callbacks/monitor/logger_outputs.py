"""Outputs to a run's loggers: numbers, tables, charts and facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pp.planning.schedules.predictions import Prediction
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis
from lightning_pp.telemetry.diagnosis.finding import Finding
from lightning_pp.telemetry.metric_table import stage_metric
from lightning_pp.telemetry.report import StageInfo, StageTimes

_OVER_STAGES = ("forward_ms", "backward_input_ms", "backward_weight_ms", "bubble_fraction", "peak_memory_gib")


class LoggerOutputs:
    """Writes to several loggers.

    During a run the strategy turns errors of loggers into warnings. The table of stages is written before that, and
    its errors are warnings too.

    Args:
        loggers: The trainer's loggers.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes numbers to every logger."""
        self._write(lambda logger: logger.log_metrics(dict(metrics), step=step))

    def log_plan(
        self, facts: Mapping[str, Any], stages: Sequence[StageInfo], predictions: Sequence[Prediction], step: int
    ) -> None:
        """Writes the values chosen for "auto" and the units of stages as hyperparameters, to W&B also as tables.

        Args:
            facts: By name, logged as ``pp/name``.
            stages: In order, logged as ``pp/{name}/stage_{s}`` and ``pp/stages``.
            predictions: The compared schedules, logged as ``pp/schedules``.
            step: The step of the tables.
        """
        self.log_facts(
            {f"pp/{name}": value for name, value in facts.items()}
            | {
                stage_metric(name, stage): value
                for stage, info in enumerate(stages)
                for name, value in {**vars(info), "units": ", ".join(info.units)}.items()
            }
        )
        rows = [[stage, info.rank, ", ".join(info.units), info.num_parameters] for stage, info in enumerate(stages)]
        self._log_table("pp/stages", ["stage", "rank", "units", "num_parameters"], rows, step)
        self.log_predictions(predictions, step)

    def log_stages(self, stages: Sequence[StageTimes], step: int) -> None:
        """Writes to W&B a line chart of F, I and W over the stages, and a table of times and memory."""
        rows = [[stage, *(getattr(times, name) for name in _OVER_STAGES)] for stage, times in enumerate(stages)]
        self._log_table("pp/over_stages", ["stage", *_OVER_STAGES], rows, step)
        columns = list(zip(*rows, strict=True))

        def write(logger: Logger) -> None:
            if isinstance(logger, WandbLogger):
                from wandb.plot import line_series

                title = "F, I and W of a microbatch over the stages, ms"
                chart = line_series(columns[0], columns[1:4], list(_OVER_STAGES[:3]), title, "stage")
                logger.log_metrics({"pp/times_over_stages": chart}, step)

        self._write(write)

    def log_facts(self, facts: Mapping[str, Any]) -> None:
        """Writes hyperparameters to every logger, in place of earlier values."""
        self._write(lambda logger: logger.log_hyperparams(dict(facts)))

    def log_predictions(self, predictions: Sequence[Prediction], step: int) -> None:
        """Writes the compared schedules to W&B."""
        columns = [field.name for field in fields(Prediction)]
        self._log_table("pp/schedules", columns, [list(astuple(row)) for row in predictions], step)

    def log_diagnosis(self, diagnosis: Diagnosis, step: int) -> None:
        """Writes the latest diagnosis as ``pp/diagnosis``.

        In W&B it is in the summary, with a table ``pp/findings``; in TensorBoard a text; elsewhere a hyperparameter.
        """

        def write(logger: Logger) -> None:
            if isinstance(logger, WandbLogger):
                logger.experiment.summary["pp/diagnosis"] = diagnosis.text
            elif isinstance(logger, TensorBoardLogger):
                lines = diagnosis.text.splitlines()
                logger.experiment.add_text("pp/diagnosis", "\n".join(f"    {line}" for line in lines), step)
            else:
                logger.log_hyperparams({"pp/diagnosis": diagnosis.text})

        self._write(write)
        if diagnosis.findings:
            columns = [field.name for field in fields(Finding)]
            self._log_table("pp/findings", columns, [list(astuple(each)) for each in diagnosis.findings], step)

    @property
    def shows_tables(self) -> bool:
        """Whether a logger takes tables and pages."""
        return any(isinstance(logger, WandbLogger) for logger in self._loggers)

    def _log_table(self, key: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        def write(logger: Logger) -> None:
            if isinstance(logger, WandbLogger):
                logger.log_table(key, columns, rows, step=step)

        self._write(write)

    def _write(self, write: Callable[[Logger], None]) -> None:
        for logger in self._loggers:
            try:
                write(logger)
            except Exception as error:
                rank_zero_warn(
                    f"{type(logger).__name__} raised {type(error).__name__}: {error}. What PipelineMonitor wrote to it "
                    "is lost. Training continues."
                )
