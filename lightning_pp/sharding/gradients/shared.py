"""Parameters that several stages hold: tied embeddings, and parameters used outside their unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pp.distributed.groups import agreed_groups, destroyed_with
from lightning_pp.sharding._torch_private import all_gather
from lightning_pp.sharding.units.flat import (
    DEFAULT_BUCKET_BYTES,
    broadcast_tensors,
    buckets,
    flags_of,
    pack_gradients,
    read_flags,
    unpack_gradients,
)

_HALF_DTYPES = (torch.float16, torch.bfloat16)


class SharedParameters:
    """Keeps one parameter on several ranks of a pipeline equal: one initial value, one gradient.

    Every holder computes the same sum in the same order, so gradients, and with them optimizer states and values, are
    equal bit for bit on all of them. A parameter whose stages are all on one rank costs no communication.

    Every rank of the pipelines that share parameters constructs this at the same point, even with nothing to share, and
    then calls its methods at the same points. If the parameters are to be sharded, shard them first, in the same way on
    every holder; gradients are reduced over data-parallel ranks before they are summed here.

    Args:
        parameters: What this rank holds, by name.
        holders: For each of these names, the global ranks that hold the parameter and have the same data-parallel
            coordinate as this rank, in the order of their stages.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], holders: Mapping[str, Sequence[int]]) -> None:
        self.parameters = dict(parameters)
        self.holders = {name: tuple(dict.fromkeys(holders[name])) for name in parameters}
        self._first_holder = {parameter: self.holders[name][0] for name, parameter in self.parameters.items()}
        self._rank = dist.get_rank()
        self._groups = agreed_groups({tuple(sorted(ranks)) for ranks in self.holders.values() if len(ranks) > 1})
        destroyed_with(self, list(self._groups.values()))

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one that counts ``parameter`` in a norm; True for one that is not shared."""
        return self._first_holder.get(parameter, self._rank) == self._rank

    @torch.no_grad()
    def broadcast_initial(self) -> None:
        """Gives every holder the value that the holder with the lowest stage has."""
        for (ranks, source), parameters in self._by_holders().items():
            broadcast_tensors(parameters, source=source, group=self._groups[ranks])

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums the gradients over the holders, in one collective for each set of holders and dtype.

        None counts as zero if another holder has a gradient, and stays None if none has. The host waits for the device
        once, if a gradient is missing here.
        """
        sums: list[tuple[list[nn.Parameter], Tensor]] = []
        for ranks, group in self._groups.items():
            names = [name for name in sorted(self.parameters) if tuple(sorted(self.holders[name])) == ranks]
            parameters = list(dict.fromkeys(self.parameters[name] for name in names))
            trainable = [parameter for parameter in parameters if parameter.requires_grad]
            for bucket in buckets(trainable, DEFAULT_BUCKET_BYTES):
                sums.append((bucket, self._sum(bucket, group, len(ranks))))
        for (bucket, total), is_anywhere in zip(sums, read_flags([flags_of(*each) for each in sums]), strict=True):
            unpack_gradients(bucket, total, is_anywhere)

    def _by_holders(self) -> dict[tuple[tuple[int, ...], int], list[Tensor]]:
        """Parameters by sorted holders and first holder, in an order that all holders share."""
        found: dict[tuple[tuple[int, ...], int], list[Tensor]] = {}
        for name in sorted(self.parameters):
            ranks = self.holders[name]
            if len(ranks) > 1:
                found.setdefault((tuple(sorted(ranks)), ranks[0]), []).append(self.parameters[name])
        return dict(sorted(found.items(), key=lambda item: item[0]))

    @staticmethod
    def _sum(parameters: list[nn.Parameter], group: dist.ProcessGroup, num_holders: int) -> Tensor:
        """Gathers all summands and adds them here; an all-reduce does not promise one order on all ranks."""
        packed = pack_gradients(parameters, parameters[0].dtype)
        summands = packed.new_empty(num_holders * packed.numel())
        all_gather(summands, packed, group=group)
        first, *others = summands.view(num_holders, -1)
        total: Tensor = first.to(torch.float32 if first.dtype in _HALF_DTYPES else first.dtype)
        for other in others:
            total += other
        return total
