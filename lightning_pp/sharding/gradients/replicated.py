"""Parameters that every data-parallel rank holds whole: averages and widens gradients, makes initial values equal."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pp.sharding.units.collective_times import CollectiveClock, TimedCollective
from lightning_pp.sharding.units.flat import (
    DEFAULT_BUCKET_BYTES,
    broadcast_tensors,
    buckets,
    flags_of,
    pack_gradients,
    read_flags,
    unpack_gradients,
)


class ReplicatedGradients:
    """Averages the gradients of unsharded parameters over the data-parallel ranks, once per optimizer step.

    All ranks must give the same parameters in the same order. A parameter without gradient on some ranks counts as
    zero there; without gradient on all of them it keeps ``grad=None``.

    Args:
        parameters: Plain parameters; those that do not require gradients at the time of a reduction are left out.
        group: The data-parallel ranks; None: all ranks.
        bucket_bytes: How much one collective carries.
        dtype: The dtype of the sum; None: that of each parameter.
        clock: Times the collectives; None: no times.
        unit: The unit that they are timed for.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        clock: CollectiveClock | None = None,
        unit: str = "",
    ) -> None:
        self.parameters = tuple(dict.fromkeys(parameters))
        self._group = group
        self._size = dist.get_world_size(group)
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._clock = clock or CollectiveClock(torch.device("cpu"))
        self._unit = unit
        self._under_way: list[tuple[list[nn.Parameter], Tensor, dist.Work | None, TimedCollective | None]] = []

    @torch.no_grad()
    def start(self) -> None:
        """Starts the reduction of gradients that are complete; :meth:`finish` puts the means in their place."""
        if self._size == 1:
            return
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        for bucket in buckets(trainable, self._bucket_bytes):
            dtype = self._dtype or bucket[0].dtype
            packed = pack_gradients(bucket, dtype)
            if dtype == torch.float16:  # a sum over many ranks leaves its range
                packed.div_(self._size)
            timed = self._clock.start("reduce", self._unit)
            work = dist.all_reduce(packed, group=self._group, async_op=True)
            self._clock.follow(timed, work)
            self._under_way.append((bucket, packed, work, timed))

    def finish(self) -> None:
        """Waits for what :meth:`start` began and sets the gradients."""
        finish_all([self])

    def wait(self) -> list[tuple[list[nn.Parameter], Tensor]]:
        """Waits for what :meth:`start` began; parameters and their packed means, which become their gradients."""
        found = []
        for bucket, packed, work, timed in self._under_way:
            if work is not None:
                with self._clock.waiting(timed):
                    work.wait()
            if packed.dtype != torch.float16:
                packed.div_(self._size)
            found.append((bucket, packed))
        self._under_way.clear()
        return found

    def all_reduce(self) -> None:
        """Averages the gradients now."""
        self.start()
        self.finish()

    def abandon(self) -> None:
        """Waits for what :meth:`start` began, and forgets it."""
        self.wait()


class WideGradients:
    """Gradients of plain parameters that accumulate in ``dtype``, and have the parameters' own dtype at the update.

    In bfloat16 a sum of many microbatches loses what is smaller than a 256th of it. Sharded parameters accumulate in
    the dtype of their reduction anyway.

    Args:
        parameters: Plain parameters; those of ``dtype`` already, and integers, are left alone.
        dtype: Of the sums; None: that of each parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self.parameters = tuple(
            p for p in parameters if dtype and p.is_floating_point() and p.dtype.itemsize < dtype.itemsize
        )

    @torch.no_grad()
    def begin(self) -> None:
        """Before a batch."""
        for parameter in self.parameters:
            if parameter.grad_dtype == self._dtype:
                continue
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = self._dtype
            if gradient is not None:
                parameter.grad = gradient.to(self._dtype)

    @torch.no_grad()
    def end(self) -> None:
        """After the reduction, or after a step that failed."""
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            if gradient is not None:
                parameter.grad = gradient.to(parameter.dtype)


@torch.no_grad()
def finish_all(reductions: Iterable[ReplicatedGradients]) -> None:
    """Waits for what each of them has started, and sets the gradients.

    The host waits for the device once, to read which gradients are missing everywhere, if any is missing here.
    """
    means = [mean for gradients in reductions for mean in gradients.wait()]
    for (bucket, packed), is_anywhere in zip(means, read_flags([flags_of(*mean) for mean in means]), strict=True):
        unpack_gradients(bucket, packed, is_anywhere)


@torch.no_grad()
def broadcast_values(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Gives ``tensors`` the values they have on the first rank of ``group``; those on the meta device are left out.

    For the data-parallel replicas of a stage, before its units are sharded.
    """
    tensors = list(dict.fromkeys(tensors))
    if dist.get_world_size(group) > 1:
        first = dist.get_global_rank(group or dist.group.WORLD, 0)  # type: ignore[arg-type]
        broadcast_tensors([tensor for tensor in tensors if not tensor.is_meta], source=first, group=group)
