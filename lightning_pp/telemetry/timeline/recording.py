"""Keeps the steps of a fit that are worth a look: one every so often, and the slowest in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_pp.runtime.timing import StepTimer
from lightning_pp.schedule import Schedule
from lightning_pp.telemetry.timeline.gathering import gather_timeline
from lightning_pp.telemetry.timeline.recorded import RecordedStep

# Ranks do not agree on the order of steps that took nearly the same; what is among so many on all of them is chosen.
_NUM_CANDIDATES = 8
_NUM_WARM_UP_BATCHES = 1
_MOST_KEPT_STEPS = 12
_MOST_KEPT_ACTIONS = 400_000
"""In all kept steps: about 5 MB of page."""


@dataclass(frozen=True)
class _Candidate:
    """A training batch.

    Attributes:
        batch: Its number in the fit, the same on every rank.
        step: The optimizer step that it belongs to.
        span_ms: From the beginning of the batch on this rank to the end of its last action; 0 if not known yet.
    """

    batch: int
    step: int
    schedule: Schedule
    timer: StepTimer
    span_ms: float = 0.0


class StepRecorder:
    """Chooses steps on all ranks of one pipeline and brings them to rank 0; every rank has one.

    A fit, on every rank of the pipeline::

        after each batch: note(); keeps the timers of the slowest batches, unread        (no collective)
        every so often: collect(); one gather of 16 numbers, and one of the times of each of two steps
        at the end: collect()

    The first batch warms up, and is left out unless there is no other. Of the steps that were collected, rank 0 keeps
    the slowest and the latest, at most 12, fewer where they are large.

    Args:
        rank: This rank's place in the pipeline.
        group: The CPU group of the pipeline; None for a pipeline of one rank.
        has_replicas: Whether stages may be sharded over replicas.

    Attributes:
        steps: What is kept, in the order of the steps; on rank 0 only.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None, *, has_replicas: bool) -> None:
        self.steps: list[RecordedStep] = []
        self._rank = rank
        self._group = group
        self._has_replicas = has_replicas
        self._num_batches = 0
        self._last: _Candidate | None = None
        self._unread: list[_Candidate] = []
        self._slowest: list[_Candidate] = []
        self._first_step: int | None = None

    def note(self, step: int, schedule: Schedule, timer: StepTimer) -> None:
        """A training batch was run; does not wait for the device.

        Args:
            step: The optimizer step that it belongs to.
            schedule: What was run.
            timer: Its times on this rank.
        """
        self._num_batches += 1
        candidate = _Candidate(self._num_batches, step, schedule, timer)
        if self._num_batches == _NUM_WARM_UP_BATCHES + 1:
            self._last, self._unread, self._slowest, self._first_step = None, [], [], None
        if self._first_step is None:
            self._first_step = step
        if self._last is None or schedule.num_microbatches >= self._last.schedule.num_microbatches:
            self._last = candidate  # not the short last batch of an epoch
        self._unread.append(candidate)
        self._read(wait=False)

    def collect(self, why: str) -> list[RecordedStep]:
        """The latest batch and the slowest since the last call. Every rank of the pipeline has to call it.

        Args:
            why: Why the latest batch is collected, for people.

        Returns:
            On rank 0 the steps, the slowest first, or just one if the latest was the slowest; elsewhere nothing.
        """
        last = self._last
        if last is None:
            return []
        self._read(wait=True)
        since = f"the slowest since step {self._first_step}"
        slowest = self._choose()
        chosen = [(last, why)]
        if slowest is not None and slowest.batch == last.batch:
            chosen = [(last, f"{why}; {since}")]
        elif slowest is not None:
            chosen.insert(0, (slowest, since))
        found = []
        for candidate, reason in chosen:
            timeline = gather_timeline(
                candidate.schedule, candidate.timer, self._group, self._rank, has_replicas=self._has_replicas
            )
            if timeline is not None:
                found.append(RecordedStep.of(candidate.step, reason, timeline))
        self._last, self._slowest, self._first_step = None, [], None
        self._keep(found)
        return found

    def _read(self, *, wait: bool) -> None:
        """Keeps of the unread batches what may be the slowest."""
        while self._unread and (wait or self._unread[0].timer.is_over()):
            candidate = self._unread.pop(0)
            self._slowest.append(
                _Candidate(
                    candidate.batch, candidate.step, candidate.schedule, candidate.timer, candidate.timer.span_ms()
                )
            )
        self._slowest = sorted(self._slowest, key=lambda one: (-one.span_ms, one.batch))[:_NUM_CANDIDATES]

    def _choose(self) -> _Candidate | None:
        """Of the batches that are among the slowest on all ranks, the one that took longest on any of them."""
        own = {candidate.batch: candidate for candidate in self._slowest}
        ranks = self._all_spans({batch: candidate.span_ms for batch, candidate in own.items()})
        common = set.intersection(*(set(spans) for spans in ranks))
        if not common:
            return None
        return own[max(sorted(common), key=lambda batch: max(spans[batch] for spans in ranks))]

    def _all_spans(self, own: dict[int, float]) -> Sequence[dict[int, float]]:
        """Batch to milliseconds, of every rank."""
        if self._group is None:
            return [own]
        row = torch.zeros(_NUM_CANDIDATES, 2, dtype=torch.float64, device="cpu")
        for index, (batch, span_ms) in enumerate(own.items()):
            row[index, 0], row[index, 1] = batch, span_ms
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, row, group=self._group)
        return [{int(batch): span_ms for batch, span_ms in of_rank.tolist() if batch} for of_rank in rows]

    def _keep(self, found: Sequence[RecordedStep]) -> None:
        """Adds steps, and drops the oldest but the slowest until the rest is not too many or too large."""
        self.steps += found
        while len(self.steps) > 1 and (
            len(self.steps) > _MOST_KEPT_STEPS or sum(step.num_actions for step in self.steps) > _MOST_KEPT_ACTIONS
        ):
            slowest = max(range(len(self.steps)), key=lambda index: self.steps[index].measured.span_ms)
            del self.steps[1 if slowest == 0 and len(self.steps) > 2 else 0]
        self.steps.sort(key=lambda step: step.step)
