"""The results of a batch, from the last stage to every rank of its pipeline, by the end of the step.

The last stage knows it after its last forward, and every rank's last backward comes later. So the report is made and
sent aside while the backwards run, and is there when a rank has ended its own part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from lightning_pp.distributed.fingerprints import Fingerprint, check_same_batch
from lightning_pp.distributed.messages import MessageLine
from lightning_pp.errors import NonFiniteError
from lightning_pp.runtime.host_copies import HostCopies
from lightning_pp.strategy.results.log_calls import LogCall
from lightning_pp.strategy.results.logs import StepLogs, replay
from lightning_pp.strategy.results.metrics import PipelineMetrics
from lightning_pp.strategy.results.outputs import loss_of, packed_outputs, unpacked_outputs

Merged = tuple[Any, dict[Any, Any]]
"""What the step returned for the whole batch, and what became of the attributes that it keeps."""


@dataclass(frozen=True)
class _Content:
    """The content of the last stage's report.

    Attributes:
        calls: What the global batch logged.
        num_samples: Samples of the global batch.
        merged: :data:`Merged` of the replica's batch, packed to be sent.
        fingerprint: Of the batch that the last stage saw.
        update_counts: Of the module's metrics.
        nonfinite: Which loss is not finite, of any replica; None for none.
        should_stop: Whether the step has said that training is to stop.
        unchecked: The part of the batch that has to be checked, if any.
    """

    calls: Sequence[LogCall]
    num_samples: int
    merged: Any
    fingerprint: Fingerprint | None
    update_counts: Sequence[int]
    nonfinite: str | None = None
    should_stop: bool = False
    unchecked: tuple[int, int] | None = None


class ReportedBatch(NamedTuple):
    """The data of a batch on one rank.

    Attributes:
        weights: Share of each microbatch.
        num_samples: Samples of the replica's batch.
        fingerprint: Of the batch that this rank saw; None: it is not compared.
        finite_in: Names the batch and this rank, if its losses have to be finite; None: no check.
        raises: Whether every rank of every pipeline raises that a loss is not finite, in place of telling it.
        unchecked_part: The part of it to be checked, once the last stage has run it; None for none.
    """

    weights: Sequence[float]
    num_samples: int
    fingerprint: Fingerprint | None = None
    finite_in: str | None = None
    raises: bool = False
    unchecked_part: Callable[[], tuple[int, int] | None] = lambda: None


@dataclass(eq=False)
class BatchReport:
    """The report of one batch on one rank; every rank of the pipeline makes it before the step.

    Attributes:
        line: Carries the report.
        logs: What the microbatches log.
        merge: Merges what they returned and changed; called on the last stage.
        batch: What the batch is here.
        device: Where this rank computes.
        metrics: Those of the module, whose counts of updates are sent; None for none.
        trainer: The step may set its ``should_stop``; None: not read.
        is_valid: Whether the batch counts, or is run again; asked when the report is to be sent.
        nonfinite: Once it is taken up, which loss of the global batch is not finite, in words; None for none.
        unchecked: Once it is taken up, the part of the batch to check; None for none.
    """

    line: MessageLine
    logs: StepLogs
    merge: Callable[[Sequence[Any]], Merged]
    batch: ReportedBatch = field(kw_only=True)
    device: torch.device = field(kw_only=True)
    metrics: PipelineMetrics | None = field(default=None, kw_only=True)
    trainer: pl.Trainer | None = field(default=None, kw_only=True)
    is_valid: Callable[[], bool] = field(default=lambda: True, kw_only=True)
    nonfinite: str | None = field(default=None, init=False)
    unchecked: tuple[int, int] | None = field(default=None, init=False)
    _own: Merged | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._message: Future[Any] | None = None if self.line.groups.is_source else self.line.listen()

    def send(self, outputs: Sequence[Any]) -> None:
        """Starts to send the report, on the last stage after its last forward; does not wait for ranks or the device.

        Of several tensor ranks of the last stage the first tells.

        Args:
            outputs: What the step returned for each microbatch.
        """
        if not self.line.groups.is_source:
            return
        if not self.is_valid():
            self._message = self.line.send(lambda: None)
            return
        copies = HostCopies()
        if self.metrics is not None:
            self.logs.take_batch_values(self.metrics.batch_values)
        self.logs.to_host(copies)
        packed: Any = None
        failure: Exception | None = None
        try:
            self._own = self.merge(outputs)
            packed = packed_outputs(self._own, copies) if self.line.groups.batch is not None else None
        except Exception as error:  # every rank of the pipeline raises it at the end of its step
            failure = error
        counted = outputs[: len(self.batch.weights)] if self.batch.finite_in is not None else ()
        losses = [copies.copy(loss_of(output)) for output in counted]
        copies.end()
        counts = [] if self.metrics is None else self.metrics.update_counts()
        should_stop, mine = self.trainer is not None and self.trainer.should_stop, self.batch.unchecked_part()

        def produce() -> _Content:
            copies.wait()
            calls, total, finding, asks_check = self.logs.merge_over_replicas(
                self.batch.weights,
                self.batch.num_samples,
                self.line.groups,
                _not_finite(losses, self.batch.finite_in),
                asks_check=mine is not None,
            )
            if failure is not None:
                raise failure
            unchecked = (mine or (0, 0)) if asks_check else None
            if finding is not None and self.batch.raises:
                raise NonFiniteError(finding)
            return _Content(calls, total, packed, self.batch.fingerprint, counts, finding, should_stop, unchecked)

        self._message = self.line.send(produce)

    def drop(self) -> None:
        """In place of :meth:`receive_and_apply`, on every rank, where the batch is not valid."""
        assert self._message is not None
        self._message.result()

    def receive_and_apply(self, module: pl.LightningModule, batch_idx: int) -> Merged:
        """At the end of this rank's step: waits for the report, and passes its logs to Lightning.

        Args:
            module: The user's module.
            batch_idx: The batch's index.

        Returns:
            :data:`Merged`, with tensors on this rank's device where they were on one on the last stage.

        Raises:
            BatchError: This rank saw another batch than the last stage.
            NonFiniteError: A loss of a replica is not finite.
            Exception: What making the report raised on the last stage.
        """
        assert self._message is not None
        content: _Content = self._message.result()
        self.nonfinite, self.unchecked = content.nonfinite, content.unchecked
        mine, theirs = self.batch.fingerprint, content.fingerprint
        if mine is not None and theirs is not None:
            check_same_batch([mine, theirs], batch_idx)
        replay(module, content.calls, content.num_samples)
        if content.should_stop:
            module.trainer.should_stop = True
        if self._own is not None:
            return self._own
        if self.metrics is not None:
            self.metrics.apply_counts(content.update_counts)
        merged: Merged = unpacked_outputs(content.merged, self.device)
        return merged


def _not_finite(losses: Sequence[torch.Tensor], where: str | None) -> str | None:
    """Which loss is not finite, in words; None for none."""
    for number, loss in enumerate(losses):
        if not bool(loss.isfinite().all()):
            of_what = f"microbatch {number + 1} of {len(losses)}" if len(losses) > 1 else "the whole batch"
            value = float(loss) if loss.numel() == 1 else loss.tolist()
            return f"The loss of {of_what} is {value}, in {where}."
    return None
