"""Watches a run from beginning to end for what may end it early: ranks that fail or wait, and signals."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pp.distributed.watch.this_rank import Position, ThisRank
from lightning_pp.strategy.faults.ends import end_at_once_when_interrupted_again, end_device_work, refuse_code_zero
from lightning_pp.strategy.faults.failed_run import FailedRuns
from lightning_pp.strategy.faults.preemption import Preemption, SignalDeadline
from lightning_pp.strategy.faults.tracebacks import main_thread_stack
from lightning_pp.strategy.faults.unequal_data import DataProgress, check_num_batches
from lightning_pp.strategy.lightning.launcher import RunLauncher
from lightning_pp.strategy.lightning.loggers import GuardedLoggers

if TYPE_CHECKING:
    from lightning_pp.strategy.pipeline import HeldPipeline
    from lightning_pp.strategy.strategy import PipelineParallelStrategy


class RunWatch:
    """Watches the runs of ``strategy``, which holds ``pipeline``, and reports this rank's progress to the others."""

    def __init__(self, strategy: PipelineParallelStrategy, pipeline: HeldPipeline) -> None:
        self._strategy = strategy
        self._pipeline = pipeline
        self._options = strategy.run_options
        self._data_progress = DataProgress()
        self._failed_runs = FailedRuns()
        self._loggers = GuardedLoggers()
        self._preemption: Preemption | None = None
        self._num_runs = 0

    def start(self) -> None:
        """Watches the other ranks from here on; every rank has to call it."""
        strategy = self._strategy
        self._data_progress.forget()
        self._preemption = None
        self._failed_runs.start(
            ThisRank(
                strategy.global_rank,
                strategy.num_ranks,
                place=lambda: self._pipeline.stages,
                position=self._position,
                progress=self._data_progress,
                stack=main_thread_stack,
                wake=self._wake,
                exit_codes=self._exit_codes,
                timeout_s=cast(timedelta, strategy.timeout).total_seconds(),
                deadlock_s=self._options.deadlock_seconds,
            )
        )

    def watch_signals(self, trainer: pl.Trainer) -> None:
        """Has a signal end the run of ``trainer`` between two batches of its pipeline."""

        def num_batches() -> int:
            return self._pipeline.built.num_batches_run

        self._num_runs += 1
        deadline = SignalDeadline(self._options.preemption_seconds, num_batches, self._end_without_batch)
        wait_for_checkpoint = self._strategy.wait_for_checkpoint
        self._preemption = Preemption(trainer, self._num_runs, num_batches, wait_for_checkpoint, deadline)

    def before_first_batch(self, trainer: pl.Trainer) -> None:
        """Compares how many batches the ranks have; from here on errors of loggers are warnings."""
        strategy = self._strategy
        if isinstance(strategy.launcher, RunLauncher):  # not with one stage on one device
            self._loggers.guard(trainer.loggers, strategy.global_rank)
            strategy.launcher.when_done = self._loggers.release
        if not strategy.is_plain and strategy.num_ranks > 1:
            check_num_batches(trainer)

    def begin_batch(self, trainer: pl.Trainer, *, evaluates: bool) -> None:
        """Before the step of each batch; a run of evaluation may end here."""
        if evaluates and self._preemption is not None:
            self._preemption.end_evaluation_if_time()
        self._data_progress.begin_batch(trainer)

    def note(self, exception: BaseException) -> None:
        """Reports to the other ranks what has ended the run, and abandons their groups, so that none waits."""
        end_at_once_when_interrupted_again(exception, self._strategy.launcher)
        self._failed_runs.note(exception, self._place())
        refuse_code_zero(exception, self._strategy.global_rank)
        if not isinstance(exception, SIGTERMException):
            self._pipeline.abandon()
            if self._strategy.has_device:
                end_device_work(self._pipeline.channels, exception)

    def end(self, *, is_interrupted: bool) -> None:
        """The run has ended."""
        if self._preemption is not None:
            self._preemption.end()
            self._preemption = None
        self._failed_runs.end()
        if is_interrupted:
            self._loggers.release()  # else the launcher does, when they have been finalized

    def _end_without_batch(self, number: signal.Signals) -> None:
        """Ends all processes: a signal has come, and no other batch."""
        what = (
            f"got {number.name}, and no other batch began within preemption_seconds="
            f"{self._options.preemption_seconds:g}: the run has ended at once, and nothing was saved"
        )
        self._failed_runs.end_all(what, self._place(), 128 + number)

    def _wake(self) -> None:
        """Another rank has failed: from a thread, ends the calls that may wait for it."""
        self._pipeline.abandon()
        if self._strategy.has_device:
            end_device_work(self._pipeline.channels)

    def _place(self) -> str:
        """Where this rank is, and how far it has come."""
        stages = self._pipeline.stages
        number = 0 if self._pipeline.engine is None else self._pipeline.engine.num_batches_trained
        return stages and f"{stages}, after {number} training batches"

    def _position(self) -> Position:
        """The progress of this rank; read from a thread."""
        engine, batch, num_collectives = self._pipeline.engine, str(self._data_progress), self._strategy.num_collectives
        if engine is None:
            return Position(batch, "", num_collectives)
        return Position(batch, engine.running_action, num_collectives + engine.num_batches_run)

    def _exit_codes(self) -> dict[int, int]:
        """Global rank to exit code of processes that this one has started."""
        strategy = self._strategy
        if not isinstance(strategy.launcher, RunLauncher):
            return {}
        first = strategy.node_rank * strategy.num_processes
        return {first + place: code for place, code in strategy.launcher.exit_codes().items()}
