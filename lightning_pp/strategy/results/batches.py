"""What training batches came to: told by the last stage, taken up by every rank when somebody looks.

A step ends on a rank when its own program has ended. What the batch logged, and the proof that all stages saw the same
one, arrives later, by a :class:`~lightning_pp.distributed.messages.MessageLine`, and is replayed in the order of the
batches before anybody can see a difference:

* at once, whatever has arrived by the end of a batch (this is what progress bars show in between);
* all of it, before metrics are read (``trainer.callback_metrics``, ``logged_metrics``: by a callback, a scheduler, the
  logger at its interval), before validation, a checkpoint, or the end of the epoch;
* before the batch after the next one, so that an error of the last stage is every rank's soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_pp.distributed.fingerprints import Fingerprint, check_same_batch
from lightning_pp.distributed.messages import Message
from lightning_pp.strategy.results.logs import replay
from lightning_pp.strategy.results.reports import BatchReport

MOST_PENDING = 1
"""Batches that a rank may start while it has not heard what they came to."""


@dataclass(frozen=True)
class _Batch:
    message: Message
    index: int
    fingerprint: Fingerprint | None
    is_first: bool | None
    current_fx: str | None


class BatchResults:
    """The batches of a fit whose results this rank has not taken up yet.

    Args:
        module: The user's module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._trainer: pl.Trainer | None = None
        self._pending: deque[_Batch] = deque()
        self._is_replaying = False
        self._is_behind = False

    def attach(self, trainer: pl.Trainer) -> None:
        """Has the trainer take up results when it, or somebody through it, looks at them."""
        self._trainer = trainer
        for target, kind in self._lightnings(trainer):
            target.__dict__["batch_results"] = self
            target.__class__ = kind
        loop = trainer.fit_loop.epoch_loop
        should_validate = loop._should_check_val_fx

        def caught_up(*args: Any) -> bool:
            decision = should_validate(*args)
            if decision:
                self.catch_up()
            return decision

        loop.__dict__["_should_check_val_fx"] = caught_up

    def detach(self) -> None:
        """Gives the trainer its own ways back; what an exception left pending is dropped."""
        self._pending.clear()
        if self._trainer is None:
            return
        trainer, self._trainer = self._trainer, None
        for target, kind in self._lightnings(trainer):
            if target.__class__ is kind:
                target.__class__ = kind.__mro__[1]
                del target.__dict__["batch_results"]
        trainer.fit_loop.epoch_loop.__dict__.pop("_should_check_val_fx", None)

    @staticmethod
    def _lightnings(trainer: pl.Trainer) -> list[tuple[Any, type]]:
        return [
            (trainer._logger_connector, _LateConnector),
            (trainer.fit_loop.epoch_loop._results, _LateResults),
        ]

    # ---------------------------------------------------------------- batches

    def make_room(self) -> None:
        """Before a batch: waits for those that are more than ``MOST_PENDING`` back."""
        while len(self._pending) > MOST_PENDING:
            self._take()

    def add(self, message: Message, index: int, fingerprint: Fingerprint | None) -> None:
        """Notes a batch that this rank is done with; ``message`` says what it came to."""
        assert self._trainer is not None
        connector = self._trainer._logger_connector
        self._pending.append(
            _Batch(message, index, fingerprint, connector._first_loop_iter, self._module._current_fx_name)
        )

    def settle(self) -> None:
        """Waits for the results of all batches so far, except after an exception: then nobody may be there to tell."""
        if self._is_replaying or self._trainer is None or self._trainer.interrupted:
            return
        while self._pending:
            self._take()

    def catch_up(self) -> None:
        """:meth:`settle`, and what Lightning would have noted of the metrics when the last batch ended."""
        self.settle()
        if self._is_behind and self._trainer is not None:
            self._trainer._logger_connector.on_batch_end()

    def take_arrived(self) -> None:
        """Takes up what has arrived; an error is left to where all ranks meet it."""
        while self._pending and not self._is_replaying:
            batch = self._pending[0]
            if not batch.message.has_arrived() or batch.message.has_failed():
                return
            self._take()

    @contextmanager
    def as_arrived(self) -> Iterator[None]:
        """Within, whoever looks at metrics sees those that have arrived."""
        self.take_arrived()
        before, self._is_replaying = self._is_replaying, True
        try:
            yield
        finally:
            self._is_replaying = before

    def batch_ended(self, finish: Callable[[], None]) -> None:
        """At the end of a batch: notes its metrics by ``finish``, which looks at them, now or when there is need."""
        assert self._trainer is not None
        self.take_arrived()
        self._is_behind = bool(self._pending) and not self.is_time()
        if not self._is_behind:
            finish()

    def is_time(self) -> bool:
        """Whether this batch's metrics go to the loggers."""
        assert self._trainer is not None
        trainer = self._trainer
        if trainer.fit_loop._should_accumulate():
            return False
        return trainer._logger_connector.should_update_logs or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]

    def _take(self) -> None:
        batch = self._pending.popleft()
        report: BatchReport = batch.message.wait()
        if batch.fingerprint is not None and report.fingerprint is not None:
            check_same_batch([batch.fingerprint, report.fingerprint], batch.index)
        if not report.calls:
            return
        assert self._trainer is not None
        # as it was when the batch ran: Lightning resets what an epoch's first batch logs for the first time
        connector, module = self._trainer._logger_connector, self._module
        now = connector._first_loop_iter, connector._current_fx, module._current_fx_name
        connector._first_loop_iter, module._current_fx_name = batch.is_first, batch.current_fx
        self._is_replaying = True
        try:
            replay(module, report.calls, report.num_samples)
        finally:
            self._is_replaying = False
            connector._first_loop_iter, connector._current_fx, module._current_fx_name = now


class _LateResults(_ResultCollection):
    """Lightning's collection of what was logged in training; complete whenever it is looked at."""

    batch_results: BatchResults

    def __bool__(self) -> bool:
        self.batch_results.settle()
        return len(self) > 0

    def metrics(self, on_step: bool) -> Any:
        self.batch_results.settle()
        return super().metrics(on_step)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        self.batch_results.settle()
        super().reset(*args, **kwargs)

    def log(self, fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        if f"{fx}.{name}" not in self:
            self.batch_results.settle()  # keys stand in the order in which they are logged first
        super().log(fx, name, *args, **kwargs)


class _LateConnector(_LoggerConnector):
    """Lightning's connector, which looks at the metrics after every batch, where that can be left for later."""

    batch_results: BatchResults

    def _is_in_training_batch(self) -> bool:
        return self._first_loop_iter is not None and isinstance(self.trainer._results, _LateResults)

    def on_batch_end(self) -> None:
        if not self._is_in_training_batch():
            super().on_batch_end()
            return
        self.batch_results.batch_ended(super().on_batch_end)
        results = self.trainer._results
        assert results is not None
        results.batch = results.batch_size = None

    def epoch_end_reached(self) -> None:
        if self._is_in_training_batch():
            self.batch_results.catch_up()
        super().epoch_end_reached()

    @property
    def progress_bar_metrics(self) -> Any:
        if not self._is_in_training_batch() or self.batch_results.is_time():
            return super().progress_bar_metrics
        with self.batch_results.as_arrived():
            return super().progress_bar_metrics
