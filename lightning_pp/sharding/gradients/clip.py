"""Clipping gradients that are spread over stages and shards, as one device would clip them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_pp.sharding._torch_private import clamp_all_max_, clamp_all_min_, multiply_all_, norm_of_each
from lightning_pp.sharding.units.flat import local_tensor

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(eq=False)
class NormUnderWay:
    """The norm of all gradients of the model, of which this rank's part is known.

    Attributes:
        parts: What the ranks' collective is over.
        norm_type: p of the p-norm.
        work: The collective, if there are other ranks.
    """

    parts: Tensor
    norm_type: float
    work: dist.Work | None

    @torch.no_grad()
    def wait(self) -> Tensor:
        """Waits for the other ranks, on a device in its present stream; the result of :func:`global_norm`."""
        if self.work is not None:
            self.work.wait()
        if math.isinf(self.norm_type):
            return torch.where(self.parts[1] > 0, math.nan, math.copysign(1.0, self.norm_type) * self.parts[0])
        return self.parts ** (1.0 / self.norm_type)


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
    return start_global_norm(parameters, mesh=mesh, norm_type=norm_type).wait()


@torch.no_grad()
def start_global_norm(
    parameters: Iterable[tuple[nn.Parameter, float]], *, mesh: DeviceMesh | None = None, norm_type: float = 2.0
) -> NormUnderWay:
    """Starts :func:`global_norm`, and does not wait for other ranks."""
    if norm_type == 0:
        raise ValueError("norm_type=0 is not a norm: give a positive number or math.inf")
    norms, device = _norms_by_copies(parameters, mesh, norm_type)
    none = torch.zeros(0, dtype=torch.float64, device=device)
    is_extreme = math.isinf(norm_type)
    if is_extreme:
        together = torch.cat([each for some in norms.values() for each in some]) if norms else none
        parts = _extreme_parts(together, math.copysign(1.0, norm_type))
    else:
        powers = [(torch.cat(some) ** norm_type).sum() / num_copies for num_copies, some in norms.items()]
        parts = torch.stack(powers).sum() if powers else none.sum()
    op = dist.ReduceOp.MAX if is_extreme else dist.ReduceOp.SUM
    return NormUnderWay(parts, norm_type, dist.all_reduce(parts, op=op, async_op=True) if is_spread() else None)


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
    total = global_norm(parameters, mesh=mesh, norm_type=norm_type)
    if note is not None:
        note(total)
    scale_((parameter for parameter, _ in parameters), clip_coefficient(total, max_norm))
    return total


def clip_coefficient(total: Tensor, max_norm: float) -> Tensor:
    """What gradients of the norm ``total`` are multiplied by: exactly 1 where they are not clipped."""
    return torch.clamp(max_norm / (total + _EPSILON), max=1.0)


@torch.no_grad()
def scale_(parameters: Iterable[nn.Parameter], coefficient: Tensor) -> None:
    """Multiplies every gradient by ``coefficient`` in place; no communication."""
    for gradients in _by_kind(_local_gradients(parameters)):
        # a tensor as the factor: no device waits for the host to read the norm
        multiply_all_(gradients, coefficient.to(gradients[0].device, gradients[0].dtype))


@torch.no_grad()
def clip_by_value_(parameters: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamps every element of every gradient to [-``clip_value``, ``clip_value``] in place; no communication."""
    for gradients in _by_kind(_local_gradients(parameters)):
        clamp_all_min_(gradients, -clip_value)
        clamp_all_max_(gradients, clip_value)


def _extreme_parts(norms: Tensor, sign: float) -> Tensor:
    """The greatest (``sign`` 1) or least (-1) of the norms times ``sign``, and 1 if one is NaN, else 0.

    A flag travels along for NaN, since no backend promises that the maximum of NaN and a number is NaN.
    """
    neutral = 0.0 if sign > 0 else -math.inf
    candidates = torch.where(norms.isnan(), neutral, sign * norms)
    greatest = torch.cat([candidates, norms.new_tensor([neutral])]).max()
    return torch.stack([greatest, norms.isnan().any().to(norms.dtype)])


def is_spread() -> bool:
    """Whether there are other ranks."""
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
