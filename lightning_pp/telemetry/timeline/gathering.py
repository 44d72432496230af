"""One step's times of all ranks, on rank 0 of their pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_pp.runtime.timing import ActionTimes, StepTimer
from lightning_pp.schedule import Action, Schedule
from lightning_pp.telemetry.timeline.step import Timeline, compute_actions, sharding_actions


def gather_row(
    row: Sequence[float], length: int, group: dist.ProcessGroup | None, rank: int
) -> list[list[float]] | None:
    """Every rank's row on rank 0, None on the others. Every rank of the pipeline has to call it.

    Args:
        row: Numbers of this rank.
        length: What rows are filled up to, the same on every rank.
        group: The CPU group of the pipeline; None for a pipeline of one rank.
        rank: This rank's place in the pipeline.
    """
    if group is None:
        return [list(row)]
    padded = torch.tensor([*row, *[0.0] * (length - len(row))], dtype=torch.float64, device="cpu")
    rows = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))] if rank == 0 else None
    dist.gather(padded, rows, group=group, group_dst=0)
    return [gathered.tolist() for gathered in rows] if rows is not None else None


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
    all_ranks = range(schedule.placement.num_ranks)
    ranks = _gather_times(timer.times(), [compute_actions(schedule, one) for one in all_ranks], group, rank)
    sharding: list[list[ActionTimes]] | None = []
    if has_replicas:
        actions = [sharding_actions(schedule, one) for one in all_ranks]
        sharding = _gather_times(timer.sharding_times(), actions, group, rank)
    if ranks is None or sharding is None:
        return None
    return Timeline.aligned(schedule, ranks, sharding)


def _gather_times(
    own: Sequence[ActionTimes], actions: Sequence[Sequence[Action]], group: dist.ProcessGroup | None, rank: int
) -> list[list[ActionTimes]] | None:
    """The times of all ranks' ``actions``, on rank 0."""
    row = [number for times in own for number in (times.asked_ms, times.start_ms, times.end_ms, times.early_ms)]
    rows = gather_row(row, 4 * max(map(len, actions)), group, rank)
    if rows is None:
        return None
    return [
        [ActionTimes(action, *row[4 * index : 4 * index + 4]) for index, action in enumerate(of_rank)]
        for of_rank, row in zip(actions, rows, strict=True)
    ]
