"""What a training batch came to, from the last stage to the ranks that will know of it later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pp.distributed.fingerprints import Fingerprint
from lightning_pp.distributed.messages import Message, MessageLine
from lightning_pp.strategy.results.host_copies import HostCopies
from lightning_pp.strategy.results.log_calls import LogCall
from lightning_pp.strategy.results.logs import StepLogs
from lightning_pp.strategy.results.outputs import loss_of, packed_outputs, unpacked_outputs
from lightning_pp.strategy.results.pending import PendingLoss, PendingOutputs

Merged = tuple[Any, list[Any]]
"""What the step returned for the whole batch, and what became of the attributes that it keeps."""


@dataclass(frozen=True)
class BatchReport:
    """What one batch came to.

    Attributes:
        calls: What the global batch logged.
        num_samples: Samples of the global batch.
        merged: :data:`Merged` of the replica's batch, packed to be sent.
        fingerprint: Of the batch that the last stage saw.
    """

    calls: Sequence[LogCall]
    num_samples: int
    merged: Any
    fingerprint: Fingerprint | None


class ComingReport:
    """A batch that this rank is done with.

    Args:
        message: Brings the :class:`BatchReport`.
        device: Where tensors go that are on an accelerator on the last stage.
        own: What is known here already, on the last stage.
    """

    def __init__(self, message: Message, device: torch.device, own: Merged | None) -> None:
        self.message = message
        self._device = device
        self._merged = own

    def outputs(self) -> Any:
        """What the step returned, pending except on the last stage."""
        if self._merged is not None:
            return self._merged[0]
        return PendingOutputs.awaiting(PendingLoss(self._loss), self._without_loss)

    def changes(self) -> list[Any]:
        """What became of kept attributes; waits for it."""
        return self._wait()[1]

    def _wait(self) -> Merged:
        if self._merged is None:
            report: BatchReport = self.message.wait()
            self._merged = unpacked_outputs(report.merged, self._device)
        assert self._merged is not None
        return self._merged

    def _loss(self) -> Tensor:
        return loss_of(self._wait()[0])

    def _without_loss(self) -> dict[str, Any]:
        output = self._wait()[0]
        return {key: value for key, value in output.items() if key != "loss"} if isinstance(output, Mapping) else {}


def report_batch(
    line: MessageLine,
    logs: StepLogs,
    merge: Callable[[], Merged],
    *,
    weights: Sequence[float],
    num_samples: int,
    fingerprint: Fingerprint | None,
    device: torch.device,
) -> ComingReport:
    """Has the last stage report a batch; every rank of the pipeline calls this once a batch, and none waits.

    Args:
        line: Carries the report.
        logs: What the microbatches logged.
        merge: Merges what they returned and changed; called on the last stage.
        weights: Share of each microbatch.
        num_samples: Samples of the replica's batch.
        fingerprint: Of the batch that this rank saw.
        device: Where this rank computes.
    """
    if not line.groups.is_last_stage:
        return ComingReport(line.next(_nothing), device, None)
    copies = HostCopies()
    logs.to_host(copies)
    own: Merged | None = None
    packed: Any = None
    failure: Exception | None = None
    try:
        own = merge()
        packed = packed_outputs(own, copies) if line.groups.pipeline_size > 1 else None
    except Exception as error:  # every rank of the pipeline raises it, when it hears of the batch
        own, failure = None, error
    copies.end()

    def produce() -> BatchReport:
        copies.wait()
        calls, total = logs.merge_over_replicas(weights, num_samples, line.groups)
        if failure is not None:
            raise failure
        return BatchReport(calls, total, packed, fingerprint)

    return ComingReport(line.next(produce), device, own)


def _nothing() -> None:
    return None
