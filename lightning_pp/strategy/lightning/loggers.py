"""Loggers that fail during a run: one warning, and the run continues.

A disk that is full, or a service that is gone, is no reason to lose a training; and an exception on the rank that logs
would leave the others waiting.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pp.strategy._lightning_private import uploads_checkpoints
from lightning_pp.strategy.lightning.patching import replaced

#: What Lightning, its callbacks and the monitor of the pipeline call.
_METHODS = ("log_metrics", "log_hyperparams", "log_graph", "log_table", "save", "finalize", "after_save_checkpoint")


class GuardedLoggers:
    """The loggers of a run, whose errors are warnings from the first batch on.

    Before it, an error ends the run: a logger that cannot be made or reached is a mistake to mend. A logger that has
    failed is called again each time, since a disk may be emptied and a network may come back.
    """

    def __init__(self) -> None:
        self._guarded = ExitStack()
        self._failed: list[Logger] = []
        self._known: list[Logger] = []

    def guard(self, loggers: Sequence[Logger], rank: int) -> None:
        """From here on errors of ``loggers`` are warnings, one for each logger, which name ``rank``."""
        for logger in loggers:
            if not any(logger is known for known in self._known):
                self._known.append(logger)
                guarded = {
                    name: self._guarded_method(logger, name, rank)
                    for name in _METHODS
                    if callable(getattr(type(logger), name, None))
                }
                self._guarded.enter_context(replaced(logger, **guarded))

    def release(self) -> None:
        """The loggers are as they were."""
        self._guarded.close()
        self._failed, self._known = [], []

    def _guarded_method(self, logger: Logger, name: str, rank: int) -> Callable[..., Any]:
        method = getattr(logger, name)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                self._warn(logger, name, rank, error)
                return None

        return call

    def _warn(self, logger: Logger, name: str, rank: int, error: Exception) -> None:
        if any(logger is failed for failed in self._failed):
            return
        self._failed.append(logger)
        warnings.warn(
            f"{type(logger).__name__}.{name} raised {type(error).__name__} on rank {rank}: {error}. The run continues "
            "and still calls this logger, but what the logger gets may be lost. Further errors of it are not reported.",
            stacklevel=3,
        )


def warn_folders_left_out(loggers: Sequence[Logger]) -> None:
    """Says that Lightning's logger of W&B makes artifacts of files only, where checkpoints are to be folders."""
    if any(isinstance(logger, WandbLogger) and uploads_checkpoints(logger) for logger in loggers):
        rank_zero_warn(
            "WandbLogger(log_model=...) does not upload checkpoints that are folders. Use "
            "lightning_pp.PipelineWandbLogger, or PipelineParallelStrategy(save_distributed_checkpoint=False)."
        )
