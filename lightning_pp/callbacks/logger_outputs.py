"""What is written to a run's loggers besides numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pp.telemetry import StageInfo


class LoggerOutputs:
    """Writes to several loggers.

    Once a run is under way the strategy turns what loggers raise into warnings. The table of stages is written before
    that, and is no reason to end a run either.

    Args:
        loggers: The trainer's loggers.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers, to every logger."""
        self._write(lambda logger: logger.log_metrics(dict(metrics), step=step))

    def log_stages(self, stages: Sequence[StageInfo], step: int) -> None:
        """Which units are where: a table in W&B, hyperparameters elsewhere."""

        def write(logger: Logger) -> None:
            if isinstance(logger, WandbLogger):
                rows = [
                    [stage, info.rank, ", ".join(info.units), info.num_parameters] for stage, info in enumerate(stages)
                ]
                logger.log_table("pp/stages", ["stage", "rank", "units", "num_parameters"], rows, step=step)
            else:
                logger.log_hyperparams(
                    {
                        f"pp_stage_{stage}/{name}": value
                        for stage, info in enumerate(stages)
                        for name, value in _hyperparameters(info).items()
                    }
                )

        self._write(write)

    def _write(self, write: Callable[[Logger], None]) -> None:
        for logger in self._loggers:
            try:
                write(logger)
            except Exception as error:
                rank_zero_warn(
                    f"What PipelineMonitor wrote to {type(logger).__name__} is lost, which raised "
                    f"{type(error).__name__}: {error}. Training goes on."
                )


def _hyperparameters(info: StageInfo) -> dict[str, int | str]:
    return {"rank": info.rank, "units": ", ".join(info.units), "num_parameters": info.num_parameters}
