"""One reduce-scatter for the gradients of one unit.

Every rank sends, for each shard, its gradients of that shard's rows and then one flag per parameter that tells whether
it had a gradient at all. So the sum also tells which parameters got a gradient on any rank: the collective has the same
shape whatever happened on a rank, and a parameter that no rank used ends with no gradient, as on one device, which an
optimizer treats differently from a gradient of zeros (no weight decay, no momentum).

Letters: N shards, R replicas, P trainable parameters of the unit, L elements of one padded shard of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_pp.sharding._torch_private import copy_all_, reduce_scatter
from lightning_pp.sharding.units.collective_times import CollectiveClock, TimedCollective
from lightning_pp.sharding.units.flat import gradient_like, local_tensor, read_flags
from lightning_pp.sharding.units.group import ParameterSlot


class GradientReduction:
    """The mean over the data-parallel ranks of a unit's gradients, under way since construction.

    On an accelerator all of it runs on ``stream`` and the host does not wait, except in :func:`finish_all` where
    sharded parameters lie on the host, for the copy of the result. On a CPU the backend's threads carry out
    each collective, and the all-reduce between replicas starts in :meth:`wait_for_shards`.

    Args:
        slots: The unit's trainable parameters, not gathered now. Their accumulated gradients are taken and dropped.
        mesh: One dimension (shard) or two (replicate, shard).
        dtype: The dtype of the sum.
        device: Where gradients accumulate, which is not where sharded parameters are if those are on the host.
        stream: Where collectives run on an accelerator; None on a CPU.
        clock: Times them.
        unit: The unit's name.
    """

    def __init__(
        self,
        slots: Sequence[ParameterSlot],
        mesh: DeviceMesh,
        dtype: torch.dtype,
        device: torch.device,
        stream: torch.Stream | None,
        clock: CollectiveClock,
        unit: str,
    ) -> None:
        self._clock = clock
        self._unit = unit
        self._timed: TimedCollective | None = None  # what is waited for next
        self._sharded = [slot.registered for slot in slots]
        self._is_here = [slot.gradient is not None for slot in slots]
        self._num_replicas = mesh.size(0) if mesh.ndim == 2 else 1
        self._num_shards = mesh.size(mesh.ndim - 1)
        self._num_ranks = self._num_replicas * self._num_shards
        self._replicate_group = mesh.get_group(0) if self._num_replicas > 1 else None
        # rows of a shard are padded to those of the first, as FSDP2 does
        self._lengths = [-(-p.shape[0] // self._num_shards) * p.shape[1:].numel() for p in self._sharded]
        self._divide_first = dtype == torch.float16  # a sum over many ranks leaves its range
        self._device = device

        packed = self._pack([slot.gradient for slot in slots], dtype)
        for slot in slots:
            slot.discard_gradient()
        self._input: Tensor | None = packed
        self._output = packed[0] if self._num_shards == 1 else torch.empty_like(packed[0])
        self._work: dist.Work | None = None
        self._event: torch.Event | None = None
        self._on_host: Tensor | None = None
        self._start(packed.view(-1), mesh, stream)

    @property
    def is_done(self) -> bool:
        """Whether :func:`finish_all` would not have to wait, on this rank and as far as is known without waiting."""
        return all(self._is_here) and self.is_reduced  # otherwise flags are read

    @property
    def is_reduced(self) -> bool:
        """Whether the collectives have ended, on this rank and as far as is known without waiting."""
        if self._event is not None:
            return bool(self._event.query())
        return self._work is not None and self._work.is_completed() and self._replicate_group is None

    def release(self) -> None:
        """Frees what was sent, once :attr:`is_reduced`: N times as much as is left."""
        if self.is_reduced:
            self._input = None

    def wait_for_shards(self) -> None:
        """Waits for the reduce-scatter, and starts the all-reduce between replicas if that has yet to start."""
        if self._event is None and self._work is not None:
            with self._clock.waiting(self._timed):
                self._work.wait()
            self._work = self._timed = None
            self._start_all_reduce()

    def flags(self) -> Tensor | None:
        """After :meth:`wait`: a number for each parameter, above zero if any rank has a gradient; None if this has all.

        Waits for the copy where parameters lie on the host.
        """
        return None if all(self._is_here) else self._result()[sum(self._lengths) :]

    def add(self, is_anywhere: Sequence[bool] | None) -> None:
        """After :meth:`wait`: adds the means to the gradients of the sharded parameters.

        Args:
            is_anywhere: Which parameters have a gradient on any rank; None: all of them.
        """
        means = self._result()[: sum(self._lengths)]
        if self._num_ranks > 1 and not self._divide_first:
            means.div_(self._num_ranks)
        means = means.to(self._sharded[0].dtype)
        shards = zip(self._sharded, torch.split(means, self._lengths), is_anywhere or self._is_here, strict=True)
        for parameter, mean, is_used in shards:
            if not is_used:
                continue
            shard = local_tensor(parameter)
            if parameter.grad is None:
                parameter.grad = gradient_like(parameter, mean[: shard.numel()])
            else:
                local_tensor(parameter.grad).add_(mean[: shard.numel()].view(shard.shape))

    def _result(self) -> Tensor:
        if self._on_host is None or self._event is None:
            return self._output
        self._event.synchronize()
        return self._on_host

    def wait(self) -> None:
        """Waits for the collectives, and leaves their result alone."""
        if self._event is not None:
            with self._clock.waiting(self._timed):
                torch.accelerator.current_stream(self._output.device).wait_event(self._event)
        else:
            self.wait_for_shards()
            if self._work is not None:
                with self._clock.waiting(self._timed):
                    self._work.wait()

    def _pack(self, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """What is sent: (N, L + P)."""
        has_gaps = not all(self._is_here) or any(p.shape[0] % self._num_shards for p in self._sharded)
        make = torch.zeros if has_gaps else torch.empty
        packed = make((self._num_shards, sum(self._lengths) + len(self._lengths)), dtype=dtype, device=self._device)
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        columns = torch.split(packed, [*self._lengths, len(self._lengths)], dim=1)
        for gradient, column in zip(gradients, columns[:-1], strict=True):
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            gradient = gradient.contiguous()
            if gradient.shape[0] % self._num_shards == 0:
                sources.append(gradient.view(self._num_shards, gradient.numel() // self._num_shards))
                targets.append(column)
                continue
            num_rows = -(-gradient.shape[0] // self._num_shards)
            for rows, shard in zip(torch.split(gradient, num_rows), column, strict=False):
                sources.append(rows.reshape(-1))
                targets.append(shard[: rows.numel()])
        if sources:
            copy_all_(targets, sources)
        columns[-1].fill_(1)
        for flags, is_here in zip(columns[-1].unbind(1), self._is_here, strict=True):
            if not is_here:
                flags.zero_()
        if self._divide_first:
            packed.div_(self._num_ranks)
        return packed

    def _start(self, flat: Tensor, mesh: DeviceMesh, stream: torch.Stream | None) -> None:
        shard_group = mesh.get_group(mesh.ndim - 1)
        if stream is None:
            if self._num_shards > 1:
                self._timed = self._clock.start("reduce", self._unit)
                self._work = reduce_scatter(self._output, flat, group=shard_group, async_op=True)
                self._clock.follow(self._timed, self._work)
            else:
                self._start_all_reduce()
            return
        stream.wait_stream(torch.accelerator.current_stream(flat.device))
        with stream:
            self._timed = self._clock.start("reduce", self._unit)
            if self._num_shards > 1:
                reduce_scatter(self._output, flat, group=shard_group)
            if self._replicate_group is not None:
                dist.all_reduce(self._output, group=self._replicate_group)
            if self._sharded[0].device != self._device:
                self._on_host = torch.empty_like(self._output, device="cpu", pin_memory=True)
                self._on_host.copy_(self._output, non_blocking=True)
            self._clock.end(self._timed)
            self._event = stream.record_event()

    def _start_all_reduce(self) -> None:
        if self._replicate_group is not None:
            self._timed = self._clock.start("reduce", self._unit)
            self._work = dist.all_reduce(self._output, group=self._replicate_group, async_op=True)
            self._clock.follow(self._timed, self._work)
            self._replicate_group = None


def finish_all(reductions: Sequence[GradientReduction]) -> None:
    """Waits for each, and adds the means to the gradients of the sharded parameters.

    The host waits for the device once, to read which gradients are missing everywhere, if any is missing here.
    """
    for reduction in reductions:
        reduction.wait_for_shards()
    for reduction in reductions:
        reduction.wait()
    all_flags = read_flags([reduction.flags() for reduction in reductions])
    for reduction, is_anywhere in zip(reductions, all_flags, strict=True):
        reduction.add(is_anywhere)
