"""Collects a sharded parameter whole on one of the ranks that hold its shards, and sends shards back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def group_of(parameter: DTensor) -> dist.ProcessGroup:
    """The ranks that together hold ``parameter`` once."""
    # rows are spread along one axis of the mesh; on others, as that of HSDP's replicas, are copies
    axis = next(axis for axis, placement in enumerate(parameter.placements) if placement.is_shard())
    return parameter.device_mesh.get_group(axis)


def chunk_of(parameter: DTensor, whole: Tensor) -> Tensor:
    """The rows of ``whole``, shaped as ``parameter``, that this rank holds; a view."""
    group = group_of(parameter)
    chunks = whole.chunk(group.size())
    return chunks[group.rank()] if group.rank() < len(chunks) else whole[:0]


def gather_to(parameter: DTensor, local: Tensor, owner: int) -> Callable[[], Tensor | None]:
    """Starts to collect what lies as ``parameter`` does at the rank ``owner`` of its group.

    Args:
        parameter: Sharded by rows.
        local: This rank's rows.
        owner: By its number in the group.

    Returns:
        Waits, and returns the whole tensor at the owner. Of one rank it is ``local`` itself.
    """
    group = group_of(parameter)
    if group.size() == 1:
        return lambda: local
    sent = _padded(parameter, local)
    parts = [torch.empty_like(sent) for _ in range(group.size())] if group.rank() == owner else None
    work = dist.gather(sent, parts, group_dst=owner, group=group, async_op=True)

    def wait() -> Tensor | None:
        work.wait()
        if parts is None:
            return None
        num_bytes = parameter.numel() * local.element_size()
        return torch.cat(parts)[:num_bytes].view(local.dtype).view(parameter.shape)

    return wait


def scatter_from(parameter: DTensor, whole: Tensor | None, local: Tensor, owner: int) -> Callable[[], None]:
    """Starts to overwrite every rank's ``local`` by its rows of ``whole``, which the owner has; returns what waits."""
    group = group_of(parameter)
    if group.size() == 1:
        return lambda: None
    received = _padded(parameter, local)
    parts = None
    if whole is not None:
        sent = whole.new_zeros(received.numel() * group.size(), dtype=torch.uint8)
        sent[: whole.numel() * whole.element_size()] = whole.contiguous().view(-1).view(torch.uint8)
        parts = list(sent.chunk(group.size()))
    work = dist.scatter(received, parts, group_src=owner, group=group, async_op=True)

    def wait() -> None:
        work.wait()
        local.copy_(received[: local.numel() * local.element_size()].view(local.dtype).view(local.shape))

    return wait


def _padded(parameter: DTensor, local: Tensor) -> Tensor:
    """The bytes of this rank's rows, padded to the same length on every rank."""
    num_rows = -(-parameter.shape[0] // group_of(parameter).size())
    flat = local.new_zeros(num_rows * (parameter.numel() // max(parameter.shape[0], 1)))
    flat[: local.numel()] = local.reshape(-1)
    return flat.view(torch.uint8)
