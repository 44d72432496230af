"""Process groups that some ranks need, made by all ranks together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

import torch.distributed as dist


def agreed_groups(
    wanted: Collection[tuple[int, ...]], *, description: str, timeout: timedelta | None = None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Makes a group for each tuple of ranks that any rank wants. To be called by all ranks of the world.

    Groups that only their members make (``use_local_synchronization``) are named after the number of groups that a rank
    has, and members of which one is in more groups than another wait for each other for ever.

    Args:
        wanted: Tuples of ranks that this rank is in. Their order matters: (0, 1) and (1, 0) are two groups.
        description: What the groups are for.
        timeout: How long a collective in them may wait.

    Returns:
        The groups that this rank wants.
    """
    of_ranks: list[Sequence[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, sorted(wanted))
    groups = {}
    for ranks in sorted({ranks for found in of_ranks for ranks in found}):
        group = dist.new_group(sorted(ranks), timeout=timeout, group_desc=description)
        if ranks in wanted:
            groups[ranks] = group
    return groups


def group_of_hosts(timeout: timedelta | None) -> dist.ProcessGroup:
    """A gloo group of all ranks, for collectives on tensors of the host. To be called by all ranks of the world."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group
