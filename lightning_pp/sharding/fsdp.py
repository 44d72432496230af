"""Sharding of the units of this rank over its data-parallel ranks, at the command of the pipeline's runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_pp.schedule.sharding import UnitPlan
from lightning_pp.sharding._torch_private import shard_together
from lightning_pp.sharding.units.collective_times import CollectiveClock
from lightning_pp.sharding.units.gather_on_use import GatherOnUse
from lightning_pp.sharding.units.group import (
    UnitGroup,
    gathered_bytes,
    groups_sharing_parameters,
    never_sharded,
    parameter_slots,
)
from lightning_pp.sharding.units.reduction import GradientReduction, finish_all
from lightning_pp.sharding.units.undo import UnitsBefore
from lightning_pp.sharding.units.windows import UnitWindows


class ShardedUnits:
    """The units of one rank's stages, with parameters, gradients and optimizer state sharded by FSDP2.

    A step of the runtime, with the units' part in it::

        for each batch of the accumulation:
            units.begin_step()
            for action in program, any order:
                F: module(...)                        # gathers; frees again if reshard_after_use
                I: autograd.backward(...)             # gathers what was freed; frees again if reshard_after_use
                W: parameter.grad += ...              # of the parameter that F saw; needs nothing gathered
                UNSHARD, RESHARD: units.unshard(unit), units.reshard(unit)
                REDUCE: units.reduce(unit)            # after the unit's last W of the last batch
            units.end_of_batch(reduce=is_last_batch)  # reduces the rest, waits, frees
        clip; optimizer.step(); optimizer.zero_grad() # on the sharded parameters, which parameters() gives now

    Reduction takes the mean over all ranks of the mesh, in ``mp_policy.reduce_dtype`` or else the dtype of the sharded
    parameters. Microbatches accumulate in the same dtype, whatever dtype they are computed in.

    **All ranks of the mesh must do the same collectives in the same order.** Reductions are safe by construction:
    every unit is reduced once in every step, whether or not anything on this rank has called it, with zeros where a
    gradient is missing; a parameter to which no rank has a gradient ends with ``grad=None``. A gather happens when a
    unit is first called, so if ranks differ in which units they call (layer drop), either give every rank the same
    random numbers or :meth:`unshard` all units in a fixed order first.

    Nothing here hooks into autograd beyond gathering and freeing: gradients move only when the runtime asks.

    Args:
        units: The units by name: modules that this rank calls through ``module(...)``. Units that share a parameter
            are gathered and reduced together. Containers of other units are refused.
        mesh: One dimension (shard) or two named ones (replicate, shard: HSDP). All ranks must hold the same values,
            see :func:`~lightning_pp.sharding.gradients.replicated.broadcast_values`.
        replicated: Parameters to leave whole, as those used outside their unit. Scalars and integers are left whole in
            any case; see :attr:`replicated`. They keep their dtype whatever ``mp_policy`` says.
        reshard_after_use: Free the gathered parameters after each forward and each backward of a unit (memory of one
            unit at a time, a gather for each F and each I). Otherwise they stay until the unit is reduced.
        mp_policy: dtypes of computation and reduction. Inputs and outputs of units are cast as FSDP2 does.
        cpu_offload: Keep shards, their gradients and so the optimizer's state on the host, as FSDP2's
            ``CPUOffloadPolicy``: a gather copies the shard to the device first, a reduction ends with a copy to the
            host, and the optimizer steps there.
        before_sharding: Called with those units that are about to be sharded together, to give their parameters memory
            and values: nothing of the ones that follow has to have any yet.
        clock: Times gathers and reductions; None: no times.

    Raises:
        ConfigurationError: A unit contains another, or the trainable parameters of a unit differ in dtype.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        *,
        mesh: DeviceMesh,
        replicated: Collection[nn.Parameter] = (),
        reshard_after_use: bool = False,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        before_sharding: Callable[[Mapping[str, nn.Module]], None] | None = None,
        clock: CollectiveClock | None = None,
    ) -> None:
        self.mesh = mesh
        self.reshard_after_use = reshard_after_use
        self.mp_policy = mp_policy or MixedPrecisionPolicy()
        self._cpu_offload = cpu_offload
        self._device = torch.device(mesh.device_type)  # where FSDP2 gathers to
        if mesh.device_type != "cpu":
            self._device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
        self._clock = clock or CollectiveClock(self._device)
        self._stream = None if mesh.device_type == "cpu" else torch.Stream(mesh.device_type)
        self._groups: list[UnitGroup] = []
        self._before: list[UnitsBefore] = []
        self._group_of: dict[str, UnitGroup | None] = dict.fromkeys(units)
        self._hooks = GatherOnUse(free_after_use=reshard_after_use, mp_policy=self.mp_policy, clock=self._clock)
        self._reductions: list[GradientReduction] = []
        self._reduce_requests: set[str] = set()
        self._is_in_batch = False

        # no list of all parameters may outlive this line: each is freed as soon as it is sharded
        self.replicated = _parameters_in_units([*never_sharded(units), *replicated], units)
        """The parameters of the units that are left whole; other code must reduce their gradients."""
        for names in groups_sharing_parameters(units, set(self.replicated)):
            together = {name: units[name] for name in names}
            if before_sharding is not None:
                before_sharding(together)
            self._shard(together)

    @property
    def names(self) -> tuple[str, ...]:
        """The units."""
        return tuple(self._group_of)

    def gathered_as(self, unit: str) -> str | None:
        """The name of what is gathered with ``unit``: its own, or several for units that share a parameter.

        None for a unit without sharded parameters.
        """
        group = self._group(unit)
        return None if group is None else group.name

    def gathered_bytes(self) -> dict[str, int]:
        """What each of the names that :meth:`gathered_as` gives takes when gathered, padding included."""
        return {group.name: group.num_bytes for group in self._groups}

    def accumulating(self, unit: str) -> list[nn.Parameter]:
        """The parameters whose ``.grad`` forwards and backwards of ``unit`` add to, once it has been gathered."""
        group = self._group(unit)
        return [] if group is None else [slot.gathered for slot in group.slots if slot.gathered is not None]

    def follow(self, plan: UnitPlan | None, *, is_ragged: bool = False) -> UnitWindows | None:
        """Gathers and frees unit by unit as ``plan`` says, until the end of the batch; None: as calls ask for it.

        Args:
            plan: For the program of the next batch.
            is_ragged: Whether some rank of the mesh leaves out parts of that program.

        Returns:
            The object that must know which action is next.
        """
        groups = {group.name: group for group in self._groups}
        windows = None
        if plan is not None:
            windows = UnitWindows(plan, groups, self._hooks.free, is_ragged=is_ragged)
        self._hooks.windows = windows
        return windows

    def begin_step(self) -> None:
        """Opens a batch.

        Raises:
            RuntimeError: The batch before was neither ended nor abandoned.
        """
        if self._is_in_batch:
            raise RuntimeError(
                "the previous batch has not ended: call end_of_batch(), or abandon_step() after a failure"
            )
        self._is_in_batch = True

    def unshard(self, unit: str) -> None:
        """Starts to gather ``unit`` and keeps it gathered until :meth:`reshard`; its next call waits for the gather.

        Raises:
            RuntimeError: A parameter is still on the meta device.
        """
        group = self._group(unit)
        if group is not None:
            group.start_gather()
            group.held_by.add(unit)

    def reshard(self, unit: str) -> None:
        """Frees the gathered parameters of ``unit``; a later call or backward gathers them again."""
        group = self._group(unit)
        if group is not None:
            group.held_by.discard(unit)
            if not group.held_by:
                self._hooks.free(group)

    def reshard_all(self) -> None:
        """Frees the gathered parameters of all units, as evaluation does after a batch."""
        self._hooks.windows = None
        for group in self._groups:
            group.held_by.clear()
            self._hooks.free(group)

    @torch.no_grad()
    def reduce(self, unit: str) -> None:
        """Starts the reduction of ``unit``, whose gradients are complete, and frees its gathered parameters.

        The result is in ``.grad`` of the sharded parameters after :meth:`reduce_all` or :meth:`end_of_batch`. Units
        that share a parameter are reduced with the last of them.

        Raises:
            RuntimeError: The unit was reduced in this step before.
        """
        group = self._group(unit)
        if unit in self._reduce_requests:
            raise RuntimeError(f"unit {unit} was reduced already in this step; reduce it once, after its last W")
        self._reduce_requests.add(unit)
        if group is None or not self._reduce_requests.issuperset(group.names):
            return
        group.held_by.clear()
        self._hooks.free(group)
        slots = []
        for slot in group.slots:
            if slot.registered.requires_grad:
                slots.append(slot)
            else:
                slot.discard_gradient()
        if not slots:
            return
        for reduction in self._reductions:
            reduction.release()
        while self._reductions and self._reductions[0].is_done:
            finish_all([self._reductions.pop(0)])
        dtype = self.mp_policy.reduce_dtype or slots[0].registered.dtype
        self._reductions.append(
            GradientReduction(slots, self.mesh, dtype, self._device, self._stream, self._clock, group.names[0])
        )

    @torch.no_grad()
    def reduce_all(self) -> None:
        """Reduces the units not reduced yet in this step, last unit first, and waits for all of them."""
        for unit in reversed(self._group_of):
            if unit not in self._reduce_requests:
                self.reduce(unit)
        finish_all(self._reductions)
        self._reductions.clear()

    def end_of_batch(self, *, reduce: bool) -> None:
        """Closes a batch: the last one of an optimizer step with ``reduce=True``, the ones before with False.

        With False gradients stay where they accumulate, and gathered parameters too, unless ``reshard_after_use``.

        Raises:
            RuntimeError: A unit got a gradient after it was reduced, or was reduced in a batch that only accumulates.
        """
        if reduce:
            self.reduce_all()
            for group in self._groups:
                for slot in group.slots:
                    if slot.gradient is not None:
                        raise RuntimeError(f"{slot.name} got a gradient after its unit was reduced in this step")
            self._reduce_requests.clear()
            self.reshard_all()
        elif self._reduce_requests:
            raise RuntimeError(
                f"units {sorted(self._reduce_requests)} were reduced in a batch that only accumulates; "
                "reduce in the last batch of the step"
            )
        self._hooks.windows = None
        self._is_in_batch = False

    @torch.no_grad()
    def discard_gradients(self) -> None:
        """Drops all gradients of the units: accumulated, under reduction, and reduced."""
        for reduction in self._reductions:
            reduction.wait()
        self._reductions.clear()
        self._reduce_requests.clear()
        self.reshard_all()
        for group in self._groups:
            group.discard_gradients()

    def abandon_step(self) -> None:
        """Forgets a step that failed, batches accumulated before it included; the next one starts afresh.

        Waits for collectives under way: if another rank will never join them, abort the process groups first.
        """
        self.discard_gradients()
        self._hooks.reset()
        self._is_in_batch = False

    def take_apart(self) -> None:
        """Makes the units ordinary modules again, which hold shards until the caller gives them whole parameters."""
        self.discard_gradients()
        for before in self._before:
            before.restore()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In the block, calls of units neither gather nor free, as parameters may be fake; casts remain."""
        self._hooks.is_paused, before = True, self._hooks.is_paused
        try:
            yield
        finally:
            self._hooks.is_paused = before

    def _shard(self, units: Mapping[str, nn.Module]) -> None:
        slots = parameter_slots(units, self.replicated)
        if not slots:
            return
        for slot in slots:
            parameter = slot.registered
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()  # FSDP2 refuses others, as those in channels_last
        modules = list(dict.fromkeys(units.values()))
        num_bytes = gathered_bytes(
            (slot.registered for slot in slots), self.mesh.size(self.mesh.ndim - 1), self.mp_policy.param_dtype
        )
        before = UnitsBefore(modules)
        leader = shard_together(modules, self.mesh, self.mp_policy, self.replicated, cpu_offload=self._cpu_offload)
        group = UnitGroup(tuple(units), leader, slots, self.mp_policy.reduce_dtype, num_bytes, self._clock)
        self._groups.append(group)
        for name in units:
            self._group_of[name] = group
        self._hooks.attach(group, modules)
        before.note_added()
        self._before.append(before)

    def _group(self, unit: str) -> UnitGroup | None:
        try:
            return self._group_of[unit]
        except KeyError:
            raise ValueError(f"no unit {unit!r} on this rank; it has {', '.join(self._group_of)}") from None


def _parameters_in_units(
    parameters: Iterable[nn.Parameter], units: Mapping[str, nn.Module]
) -> tuple[nn.Parameter, ...]:
    """Those of ``parameters`` that belong to ``units``, each once."""
    own = {parameter for unit in units.values() for parameter in unit.parameters()}
    return tuple(parameter for parameter in dict.fromkeys(parameters) if parameter in own)
