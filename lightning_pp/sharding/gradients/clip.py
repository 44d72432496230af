"""Clipping gradients that are spread over stages and shards, as one device would clip them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_pp.sharding._torch_private import clamp_all_max_, clamp_all_min_, multiply_all_, norm_of_each
from lightning_pp.sharding.units.flat import local_tensor

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def global_norm(
    parameters: Iterable[tuple[nn.Parameter, float]],
    *,
    mesh: DeviceMesh | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """The norm of all gradients of the model as one vector, equal on every rank; one collective that all have to call.

    Args:
        parameters: The parameters of this rank, each with the share of it that counts here, between 0 and 1: of a
            parameter on several stages, one holder counts it (:meth:`.SharedParameters.counts_here`). Parameters
            without gradient are left out.
        mesh: The data-parallel mesh. A plain parameter counts as held by all its ranks, a DTensor as its placements
            say. None: no data parallelism, and all parameters on one device.
        norm_type: p of the p-norm: any number but 0, infinities included.

    Returns:
        The norm, a float64 scalar on the device of the mesh, or else of the parameters; non-finite if a gradient is.

    Raises:
        ValueError: ``norm_type`` is 0.
    """
    if norm_type == 0:
        raise ValueError("norm_type=0 is not a norm: give a positive number or math.inf")
    norms, device = _norms_by_copies(parameters, mesh, norm_type)
    none = torch.zeros(0, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        together = torch.cat([each for some in norms.values() for each in some]) if norms else none
        return _extreme(together, math.copysign(1.0, norm_type))
    powers = [(torch.cat(some) ** norm_type).sum() / num_copies for num_copies, some in norms.items()]
    total = torch.stack(powers).sum() if powers else none.sum()
    if _is_spread():
        dist.all_reduce(total)
    return total ** (1.0 / norm_type)


def _norms_by_copies(
    parameters: Iterable[tuple[nn.Parameter, float]], mesh: DeviceMesh | None, norm_type: float
) -> tuple[dict[float, list[Tensor]], torch.device]:
    """Norms of this rank's gradients, by the number of ranks that count the same, and the device that they are on."""
    device = torch.device("cpu" if mesh is None else mesh.device_type)
    # by the number of ranks that count the same, and what one call takes together
    alike: dict[tuple[float, torch.device, torch.dtype], list[Tensor]] = {}
    for parameter, share in {id(parameter): (parameter, share) for parameter, share in parameters}.values():
        if mesh is None:
            device = parameter.device
        if not share or parameter.grad is None:
            continue
        gradient = local_tensor(parameter.grad)
        if gradient.numel() > 0:  # an empty shard has no extreme
            kind = _num_copies(parameter.grad, mesh) / share, gradient.device, gradient.dtype
            alike.setdefault(kind, []).append(gradient)
    norms: dict[float, list[Tensor]] = {}
    for (num_copies, _, dtype), gradients in alike.items():
        each = torch.stack(norm_of_each(gradients, norm_type, torch.promote_types(dtype, torch.float32)))
        # shards may lie on the host, and others not
        norms.setdefault(num_copies, []).append(each.to(device, torch.float64))
    return norms, device


@torch.no_grad()
def own_square(parameters: Iterable[tuple[nn.Parameter, float]], mesh: DeviceMesh | None = None) -> Tensor:
    """This rank's part of the square of the gradients' 2-norm: over the data-parallel ranks the parts add up to it.

    The arguments are those of :func:`global_norm`.

    Returns:
        A float64 scalar on the device of the mesh, or else of the parameters. No collective.
    """
    norms, device = _norms_by_copies(parameters, mesh, 2.0)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for num_copies, some in norms.items():
        total += (torch.cat(some) ** 2).sum() / num_copies
    return total


@torch.no_grad()
def clip_by_norm_(
    parameters: Iterable[tuple[nn.Parameter, float]],
    max_norm: float,
    *,
    mesh: DeviceMesh | None = None,
    norm_type: float = 2.0,
    note: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Scales gradients in place so that :func:`global_norm` is at most ``max_norm``; returns the norm before.

    Arguments are those of :func:`global_norm`; ``note`` gets the norm before anything is scaled. A non-finite norm
    makes gradients NaN or zero, as ``torch.nn.utils.clip_grad_norm_(error_if_nonfinite=False)`` does.
    """
    parameters = list(parameters)
    by_kind = _by_kind(_local_gradients(parameter for parameter, _ in parameters))  # before other ranks are waited for
    total = global_norm(parameters, mesh=mesh, norm_type=norm_type)
    if note is not None:
        note(total)
    coefficient = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    for gradients in by_kind:
        # a tensor as the factor: no device waits for the host to read the norm
        factor = coefficient.to(gradients[0].device, gradients[0].dtype)
        multiply_all_(gradients, factor)
    return total


@torch.no_grad()
def clip_by_value_(parameters: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamps every element of every gradient to [-``clip_value``, ``clip_value``] in place; no communication."""
    for gradients in _by_kind(_local_gradients(parameters)):
        clamp_all_min_(gradients, -clip_value)
        clamp_all_max_(gradients, clip_value)


def _extreme(norms: Tensor, sign: float) -> Tensor:
    """The greatest (``sign`` 1) or least (-1) of the norms of all ranks; NaN if one is NaN.

    A flag travels along for NaN, since no backend promises that the maximum of NaN and a number is NaN.
    """
    neutral = 0.0 if sign > 0 else -math.inf
    candidates = torch.where(norms.isnan(), neutral, sign * norms)
    greatest = torch.cat([candidates, norms.new_tensor([neutral])]).max()
    parts = torch.stack([greatest, norms.isnan().any().to(norms.dtype)])
    if _is_spread():
        dist.all_reduce(parts, op=dist.ReduceOp.MAX)
    return torch.where(parts[1] > 0, math.nan, sign * parts[0])


def _is_spread() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _num_copies(gradient: Tensor, mesh: DeviceMesh | None) -> int:
    """How many ranks of the mesh hold, and so count, the same elements."""
    if isinstance(gradient, DTensor):
        sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
        return math.prod(size for placement, size in sizes if placement.is_replicate())
    return 1 if mesh is None else mesh.size()


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    unique = {id(parameter): parameter for parameter in parameters}
    return [local_tensor(parameter.grad) for parameter in unique.values() if parameter.grad is not None]


def _by_kind(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(found.values())
