"""What the ranks of a pipeline have measured, on the first of them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from lightning_pp.runtime.timing import StepTimer
from lightning_pp.schedule import Schedule
from lightning_pp.telemetry.timeline.step import Timeline

T = TypeVar("T")


def gather(value: T, group: dist.ProcessGroup | None, rank: int) -> list[T] | None:
    """Every rank's value on rank 0, None on the others. Every rank of the pipeline has to call it.

    Args:
        value: This rank's; can be pickled.
        group: The CPU group of the pipeline; None for a pipeline of one rank.
        rank: This rank's place in the pipeline.
    """
    if group is None:
        return [value]
    values: list[Any] | None = [None] * group.size() if rank == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values


def gather_timeline(
    schedule: Schedule, timer: StepTimer, group: dist.ProcessGroup | None, rank: int, *, has_replicas: bool
) -> Timeline | None:
    """One step of all ranks on one clock, on rank 0; None on the others. Every rank of the pipeline has to call it.

    Args:
        schedule: What was run, the same on every rank.
        timer: This rank's timer of the step; on CUDA it is waited for.
        group: The CPU group of the pipeline; None for a pipeline of one rank.
        rank: This rank's place in the pipeline.
        has_replicas: Whether stages may be sharded over replicas, so that gathers and reductions belong to the step.
    """
    ranks = gather((timer.times(), timer.sharding_times() if has_replicas else []), group, rank)
    if ranks is None:
        return None
    return Timeline.aligned(schedule, [times for times, _ in ranks], [beside for _, beside in ranks])
