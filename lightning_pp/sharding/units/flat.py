"""Many tensors as few flat ones, for collectives that cost more to start than to carry out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice, repeat
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pp.sharding._torch_private import dtensor_of

DEFAULT_BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel
_SENT_ALONE_BYTES = 2**20

_Tensor = TypeVar("_Tensor", bound=Tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``: its shard if it is a DTensor. Shares memory; call without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def gradient_like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """A gradient for ``parameter`` made of ``local``, the part of this rank, in any shape; shares its memory."""
    if not isinstance(parameter, DTensor):
        return local.view(parameter.shape)
    own = local.view(parameter.to_local().shape)
    return dtensor_of(own, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def buckets(tensors: Iterable[_Tensor], max_bytes: int) -> list[list[_Tensor]]:
    """Runs of tensors of one dtype and device, in order, each at most ``max_bytes`` unless a single one is larger."""
    open_buckets: dict[Hashable, list[_Tensor]] = {}
    num_bytes: dict[Hashable, int] = {}
    found: list[list[_Tensor]] = []
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        if kind not in open_buckets or num_bytes[kind] + size > max_bytes:
            open_buckets[kind] = []
            num_bytes[kind] = 0
            found.append(open_buckets[kind])
        open_buckets[kind].append(tensor)
        num_bytes[kind] += size
    return found


def pack_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> Tensor:
    """The local gradients in a row, zeros for missing ones, and then a flag per parameter: whether it has one."""
    parts: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parts.append(torch.zeros(local_tensor(parameter).numel(), dtype=dtype, device=parameter.device))
        else:
            gradient = local_tensor(parameter.grad)
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            parts.append(gradient.reshape(-1).to(dtype))
    # written on the device: to make a tensor there of what the host knows waits for the device
    flags = torch.ones(len(parameters), dtype=dtype, device=parameters[0].device)
    for flag, parameter in zip(flags, parameters, strict=True):
        if parameter.grad is None:
            flag.zero_()
    return torch.cat([*parts, flags])


def flags_of(parameters: Sequence[nn.Parameter], packed: Tensor) -> Tensor | None:
    """Of a sum of what :func:`pack_gradients` gave on several ranks, the flags; None if no gradient is missing here."""
    is_missing = any(parameter.grad is None for parameter in parameters)
    return packed[-len(parameters) :] if is_missing else None


def read_flags(flags: Sequence[Tensor | None]) -> list[list[bool] | None]:
    """For each, which of its flags are above zero; None for None. The host waits once for all of them, if at all."""
    given = [some for some in flags if some is not None]
    if not given:
        return [None] * len(flags)
    found = iter(torch.cat([(some > 0).to(given[0].device) for some in given]).tolist())
    return [None if some is None else list(islice(found, some.numel())) for some in flags]


def unpack_gradients(parameters: Sequence[nn.Parameter], packed: Tensor, is_anywhere: Sequence[bool] | None) -> None:
    """Sets the gradients from the sum of what :func:`pack_gradients` gave on several ranks.

    Args:
        parameters: The parameters.
        packed: The sum.
        is_anywhere: Which of them have a gradient on any rank, as :func:`read_flags` gives it; others keep None. None:
            all of them.
    """
    lengths = [local_tensor(parameter).numel() for parameter in parameters]
    *values, _ = torch.split(packed, [*lengths, len(parameters)])
    for parameter, value, is_used in zip(parameters, values, is_anywhere or repeat(True), strict=False):
        if not is_used:
            continue
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = gradient_like(parameter, value.to(parameter.grad_dtype or parameter.dtype, copy=True))
        else:
            gradient = local_tensor(parameter.grad)
            gradient.copy_(value.view(gradient.shape))


def broadcast_tensors(tensors: Iterable[Tensor], *, source: int, group: dist.ProcessGroup | None) -> None:
    """Overwrites the local part of each tensor with that of the global rank ``source``, as bytes.

    Large tensors are sent from where they are, one by one; small ones are copied together for few collectives.
    """
    small: list[Tensor] = []
    for local in map(local_tensor, tensors):
        if local.numel() * local.element_size() < _SENT_ALONE_BYTES:
            small.append(local)
            continue
        sent = local.contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), src=source, group=group)
        if sent is not local:
            local.copy_(sent)
    for bucket in buckets(small, DEFAULT_BUCKET_BYTES):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        if flat.numel() == 0:
            continue
        dist.broadcast(flat.view(torch.uint8), src=source, group=group)
        for tensor, value in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(value.view(tensor.shape))
