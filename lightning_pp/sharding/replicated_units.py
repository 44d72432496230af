"""Units that every data-parallel rank holds whole, each reduced as soon as its gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from lightning_pp.sharding.gradients.replicated import ReplicatedGradients, finish_all
from lightning_pp.sharding.units.collective_times import CollectiveClock
from lightning_pp.sharding.units.group import groups_sharing_parameters


class ReplicatedUnits:
    """As :class:`~lightning_pp.sharding.fsdp.ShardedUnits`, with nothing to gather: the units of one rank's stages.

    The gradients of a unit are averaged over the data-parallel ranks by all-reduces, one for a unit of usual size,
    which :meth:`reduce` starts and :meth:`end_of_batch` waits for.

    **All ranks of the group must reduce the same units in the same order.** Every unit is reduced once in every step,
    with zeros where a gradient is missing; a parameter to which no rank has a gradient ends with ``grad=None``.

    Args:
        units: The units by name. Units that share a parameter are reduced together.
        group: The data-parallel ranks, which hold the same values.
        replicated: Parameters that other code reduces, as those used outside their unit.
        dtype: The dtype of the sum; None: that of each parameter.
        clock: Times the collectives; None: no times.

    Raises:
        ConfigurationError: A unit contains another.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        group: dist.ProcessGroup | None = None,
        *,
        replicated: Collection[nn.Parameter] = (),
        dtype: torch.dtype | None = None,
        clock: CollectiveClock | None = None,
    ) -> None:
        others = set(replicated)
        self._together: dict[str, tuple[frozenset[str], ReplicatedGradients]] = {}
        for names in groups_sharing_parameters(units, others):
            parameters = [p for name in names for p in units[name].parameters() if p not in others]
            gradients = ReplicatedGradients(parameters, group, dtype=dtype, clock=clock, unit=names[0])
            for name in names:
                self._together[name] = (frozenset(names), gradients)
        self.names = tuple(units)
        self.before_reduction: Callable[[Iterable[nn.Parameter]], None] = lambda _: None
        self._requests: set[str] = set()
        self._started: list[ReplicatedGradients] = []

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters that are reduced here."""
        return {parameter for _, gradients in self._together.values() for parameter in gradients.parameters}

    def accumulating(self, unit: str) -> list[nn.Parameter]:
        """The parameters whose ``.grad`` forwards and backwards of ``unit`` add to."""
        return list(self._together[unit][1].parameters)

    def reduce(self, unit: str) -> None:
        """Starts the reduction of ``unit``, whose gradients are complete.

        Units that share a parameter are reduced with the last of them.

        Raises:
            RuntimeError: The unit was reduced in this step before.
        """
        if unit in self._requests:
            raise RuntimeError(f"unit {unit} was reduced already in this step; reduce it once, after its last W")
        self._requests.add(unit)
        names, gradients = self._together[unit]
        if self._requests.issuperset(names):
            self.before_reduction(gradients.parameters)
            gradients.start()
            self._started.append(gradients)

    def end_of_batch(self, *, reduce: bool) -> None:
        """Closes a batch; with ``reduce`` it reduces the units not reduced yet, last first, and waits for all.

        Raises:
            RuntimeError: A unit was reduced in a batch that only accumulates.
        """
        if reduce:
            for unit in reversed(self.names):
                if unit not in self._requests:
                    self.reduce(unit)
            finish_all(self._started)
            self._started.clear()
            self._requests.clear()
        elif self._requests:
            raise RuntimeError(
                f"units {sorted(self._requests)} were reduced in a batch that only accumulates; "
                "reduce in the last batch of the step"
            )

    def abandon_step(self) -> None:
        """Forgets a step that failed, after waiting for the collectives under way."""
        for gradients in self._started:
            gradients.abandon()
        self._started.clear()
        self._requests.clear()
