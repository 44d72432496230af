"""Keeps the latest steps of a training on every rank, and brings them together for a diagnosis."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch

from lightning_pp.distributed.gathering import gather
from lightning_pp.runtime.split_backward.deferral import WeightGradientQueue
from lightning_pp.runtime.timing import ActionTimes, StepTimer
from lightning_pp.schedule import Action, Schedule
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis, diagnose
from lightning_pp.telemetry.diagnosis.evidence import Evidence, RankEvidence

if TYPE_CHECKING:
    from lightning_pp.telemetry.measurement import MeasurablePipeline

NUM_STEPS = 8
"""Steps that a diagnosis looks at, the latest of those with the same actions."""
_DUE_AFTER = (NUM_STEPS, 2 * NUM_STEPS, 4 * NUM_STEPS)  # the first steps may not be like those that follow
_FEWEST_STEPS = 3
_FAR_LONGER = 1.5
_MOMENTS = ("asked_ms", "start_ms", "end_ms", "early_ms")


class StepWindow:
    """The latest steps of one rank of the first replica; other replicas are not looked at.

    Args:
        pipeline: What runs on this rank.
    """

    def __init__(self, pipeline: MeasurablePipeline) -> None:
        self._pipeline = pipeline
        self._is_measured = pipeline.replica == 0
        self._steps: deque[tuple[StepTimer, float, float]] = deque(maxlen=NUM_STEPS)
        self._schedule: Schedule | None = None
        self._num_samples = 0
        self._num_steps = 0
        self._num_others = 0
        self._deferred_shapes: set[torch.Size] = set()

    def batch_ended(self, step_ms: float | None, data_ms: float) -> None:
        """Notes a training batch; no collective, and it does not wait for the device.

        Args:
            step_ms: Its wall time, as :meth:`FitMeasurement.batch_ended` has it.
            data_ms: How long the rank waited for its loader before the batch.
        """
        step = self._pipeline.last_training_step
        if step_ms is None or step is None or not self._pipeline.is_settled:
            return
        if self._schedule is not step[0] and (self._schedule is None or _actions(self._schedule) != _actions(step[0])):
            # the last batch of an epoch, or a batch of an accumulation: not unless there are only such
            self._num_others += 1
            if self._schedule is not None and self._num_others < NUM_STEPS:
                return
            self._steps.clear()
            self._schedule = step[0]
            self._deferred_shapes = WeightGradientQueue.watched = set()
        self._num_others = 0
        self._num_samples = self._pipeline.last_num_samples
        self._num_steps += 1
        self._steps.append((step[1], step_ms, data_ms))

    @property
    def is_due(self) -> bool:
        """Whether it is time for a diagnosis, thrice in a fit; the same on every rank of the pipeline."""
        return self._num_steps in _DUE_AFTER and len(self._steps) == NUM_STEPS

    def diagnose(self, num_workers: int | None = None) -> Diagnosis | None:
        """Gathers what the ranks measured on rank 0, and diagnoses it there; every rank has to call it.

        Args:
            num_workers: Worker processes of this rank's loader.

        Returns:
            None on the other ranks, and where there were too few steps.
        """
        if not self._is_measured or self._schedule is None or len(self._steps) < _FEWEST_STEPS:
            return None
        WeightGradientQueue.watched = None
        own = RankSteps(
            times=[timer.times() for timer, _, _ in self._steps],
            step_ms=[step_ms for _, step_ms, _ in self._steps],
            data_ms=[data_ms for _, _, data_ms in self._steps],
            facts={
                "host": socket.gethostname(),
                "num_samples": self._num_samples,
                "num_workers": num_workers,
                "num_cores": _cores_of_a_rank(),
                "deferred_shapes": frozenset(map(tuple, self._deferred_shapes)),
            },
        )
        ranks = gather(own, self._pipeline.groups.pipeline, self._pipeline.rank)
        if ranks is None:
            return None
        usual = usual_steps(ranks)
        evidence = [rank.mean_of(usual) for rank in ranks]
        return diagnose(Evidence.of(self._schedule, evidence, self._pipeline.plan_facts()), len(usual))


@dataclass(frozen=True)
class RankSteps:
    """What one rank measured, step by step; the names, and those of ``facts``, are those of :class:`RankEvidence`."""

    times: Sequence[Sequence[ActionTimes]]
    step_ms: Sequence[float]
    data_ms: Sequence[float]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def mean_of(self, steps: Sequence[int]) -> RankEvidence:
        """Means over some of the steps."""
        return RankEvidence(
            times=mean_times([self.times[step] for step in steps]),
            step_ms=fmean(self.step_ms[step] for step in steps),
            data_ms=fmean(self.data_ms[step] for step in steps),
            steps=[self.times[step] for step in steps],
            **self.facts,
        )


def usual_steps(ranks: Sequence[RankSteps]) -> list[int]:
    """Steps that took no rank far longer than usual, as one does with a validation or a checkpoint before its end."""
    longest = [max(of_ranks) for of_ranks in zip(*(rank.step_ms for rank in ranks), strict=True)]
    usual = median(longest)
    return [step for step, step_ms in enumerate(longest) if step_ms <= _FAR_LONGER * usual]


def mean_times(steps: Sequence[Sequence[ActionTimes]]) -> list[ActionTimes]:
    """The mean moments of every action over steps of the same program."""
    return [
        ActionTimes(same[0].action, *(fmean(getattr(one, name) for one in same) for name in _MOMENTS))
        for same in zip(*steps, strict=True)
    ]


def _actions(schedule: Schedule) -> list[list[Action]]:
    """The F, I, W and B of every rank."""
    return [[action for action in program if action.kind.is_compute] for program in schedule.programs]


def _cores_of_a_rank() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
