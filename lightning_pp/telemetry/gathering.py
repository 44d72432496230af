"""Gathers the measurements of a pipeline's ranks on the first rank."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

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
