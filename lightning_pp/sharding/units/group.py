"""The parameters of one or more units that are gathered, freed and reduced together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding._torch_private import all_gather
from lightning_pp.sharding.units.collective_times import CollectiveClock, TimedCollective
from lightning_pp.split._torch_private import parameters_of


@dataclass(eq=False)
class ParameterSlot:
    """The places in modules that hold a sharded parameter, or the gathered one while its unit is gathered.

    Args:
        name: Full name, for messages.
        places: The modules in which the parameter is registered, with its name there; at least one.
        gathered: The parameter that forwards see and that autograd and deferred weight gradients add ``.grad`` to.
            FSDP2 makes it when it gathers for the first time and uses the same object ever after; None before.
        sharded: What the module held before it was gathered.
    """

    name: str
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    gathered: nn.Parameter | None = None
    sharded: nn.Parameter | None = None

    def register(self, parameter: nn.Parameter | None) -> None:
        """Has the module hold ``parameter``."""
        for owner, attribute in self.places:
            if type(owner).__setattr__ is nn.Module.__setattr__:
                parameters_of(owner)[attribute] = parameter
            else:  # recurrent layers keep lists of their own
                setattr(owner, attribute, parameter)

    @property
    def registered(self) -> nn.Parameter:
        """What the module holds now: the sharded parameter unless its unit is gathered."""
        parameter = getattr(*self.places[0])
        assert isinstance(parameter, nn.Parameter)
        return parameter

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that this rank has accumulated, of the shape of the whole parameter."""
        return None if self.gathered is None else self.gathered.grad

    def discard_gradient(self) -> None:
        if self.gathered is not None:
            self.gathered.grad = None


class UnitGroup:
    """Units that are sharded as one: a single unit, or several that share a parameter.

    Args:
        names: The units.
        leader: The module whose ``unshard()`` and ``reshard()`` act on the whole group.
        slots: The sharded parameters, each once.
        gradient_dtype: The dtype in which microbatches accumulate; None: that of the sharded parameter.
        num_bytes: What the group takes when gathered.
        clock: Times gathers.
    """

    def __init__(
        self,
        names: Sequence[str],
        leader: FSDPModule,
        slots: Sequence[ParameterSlot],
        gradient_dtype: torch.dtype | None,
        num_bytes: int,
        clock: CollectiveClock,
    ) -> None:
        self.names = tuple(names)
        self.num_bytes = num_bytes
        self.slots = tuple(slots)
        # the units for which the program has asked to keep the group gathered
        self.held_by: set[str] = set()
        self._leader = leader
        self._gradient_dtype = gradient_dtype
        self._clock = clock
        self._noted: NotedAllGather | None = None
        self._under_way: UnshardHandle | None = None
        self._timed: TimedCollective | None = None  # of what is under way
        self._is_concealed = False

    @property
    def name(self) -> str:
        """The units in one name, for plans and messages."""
        return ", ".join(self.names)

    @property
    def is_gathered(self) -> bool:
        """Whether a forward can run now; a gather under way does not count."""
        # Asked of the module and not remembered, since saving and loading a state dict frees parameters as well.
        if self.slots[0].gathered is None:
            return False
        if self._is_concealed:
            return any(slot.gathered is not None and slot.gathered.untyped_storage().size() for slot in self.slots)
        return self.slots[0].registered is self.slots[0].gathered

    def start_gather(self) -> None:
        """Starts to gather; :meth:`gather` waits for it.

        Raises:
            RuntimeError: A parameter is still on the meta device.
        """
        if self._under_way is None and not self.is_gathered:
            self._note_sharded()
            self._timed = self._clock.start("gather", self.names[0])
            if self._timed is not None and self._noted is None:
                self._noted = NotedAllGather()
                self._leader.set_custom_all_gather(self._noted)  # type: ignore[arg-type] # its type is not public
            self._under_way = self._leader.unshard(async_op=True)
            if self._noted is not None:
                self._clock.follow(self._timed, self._noted.take_work())

    def gather(self) -> None:
        """Gathers and waits, unless that is done.

        Raises:
            RuntimeError: A parameter is still on the meta device.
        """
        if self._under_way is not None:
            with self._clock.waiting(self._timed):
                self._under_way.wait()
            self._under_way = self._timed = None
            self._note_gathered()
        elif not self.is_gathered:
            self._note_sharded()
            with self._clock.exposed("gather", self.names[0]):
                self._leader.unshard()
            self._note_gathered()

    def reveal(self) -> None:
        """Shows what is gathered to the module, for a call of it."""
        if self._is_concealed:
            for slot in self.slots:
                slot.register(slot.gathered)
            self._is_concealed = False

    def conceal(self) -> None:
        """Shows sharded parameters to the code between units, while what is gathered stays.

        They have the dtype that the user knows, also where units compute in another.
        """
        if self._under_way is None and self.is_gathered and not self._is_concealed:
            for slot in self.slots:
                slot.register(slot.sharded)
            self._is_concealed = True

    def _note_sharded(self) -> None:
        for slot in self.slots:
            if slot.registered.is_meta:
                raise RuntimeError(
                    f"parameter {slot.name} is still on the meta device; give it a value before the first step "
                    "(to_empty and reset_parameters, or load a checkpoint)"
                )
            slot.sharded = slot.registered

    def _note_gathered(self) -> None:
        self._is_concealed = False
        if self.slots[0].gathered is not None:
            return
        for slot in self.slots:
            assert slot.sharded is not None
            slot.gathered = slot.registered
            if slot.sharded.is_floating_point():
                # bf16 sums of many microbatches drift; autograd casts each gradient before it adds
                slot.gathered.grad_dtype = self._gradient_dtype or slot.sharded.dtype

    def free(self) -> None:
        """Frees the gathered parameters, those of a gather under way included; gradients stay."""
        if self._under_way is not None:
            self.gather()
        self._leader.reshard()
        self._is_concealed = False

    def discard_gradients(self) -> None:
        """Drops accumulated and reduced gradients; the group must not be gathered."""
        for slot in self.slots:
            slot.discard_gradient()
            slot.registered.grad = None


def gathered_bytes(parameters: Iterable[Tensor], num_shards: int, dtype: torch.dtype | None) -> int:
    """What parameters take when gathered: in ``dtype`` if they are floating-point, their rows padded to even shards."""
    total = 0
    for parameter in parameters:
        num_rows = -(-parameter.shape[0] // num_shards) * num_shards
        kept = dtype is None or not parameter.is_floating_point()
        total += num_rows * parameter.shape[1:].numel() * (parameter.dtype if kept else dtype).itemsize  # type: ignore[union-attr]
    return total


def parameter_slots(units: Mapping[str, nn.Module], excluded: Iterable[nn.Parameter]) -> list[ParameterSlot]:
    """A slot for each parameter of ``units`` outside ``excluded``, with all places where it is registered.

    Raises:
        ConfigurationError: Trainable parameters differ in dtype.
    """
    left_out = set(excluded)
    slots: dict[nn.Parameter, ParameterSlot] = {}
    for unit_name, unit in units.items():
        for name, parameter in unit.named_parameters(remove_duplicate=False):
            if parameter in left_out:
                continue
            prefix, _, attribute = name.rpartition(".")
            place = unit.get_submodule(prefix), attribute
            slot = slots.setdefault(parameter, ParameterSlot(f"{unit_name}.{name}" if unit_name else name))
            if place not in slot.places:
                slot.places.append(place)
    by_dtype: dict[torch.dtype, list[str]] = {}
    for slot in slots.values():
        if slot.registered.requires_grad:
            by_dtype.setdefault(slot.registered.dtype, []).append(slot.name)
    if len(by_dtype) > 1:
        found = "; ".join(f"{len(names)} in {dtype}, as {names[0]}" for dtype, names in by_dtype.items())
        raise ConfigurationError(
            f"the trainable parameters of unit {', '.join(units)} differ in dtype ({found}), but are reduced in one "
            "collective. Cast them to one dtype, or leave those of one dtype out of sharding with `replicated`"
        )
    return list(slots.values())


def never_sharded(units: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    """Parameters without a dimension to shard, and integers, which take no gradient."""
    return [
        parameter
        for unit in units.values()
        for parameter in unit.parameters()
        if parameter.dim() == 0 or not (parameter.is_floating_point() or parameter.is_complex())
    ]


def groups_sharing_parameters(units: Mapping[str, nn.Module], excluded: set[nn.Parameter]) -> list[list[str]]:
    """The units, in order, joined where they share a parameter outside ``excluded``, or are one module."""
    _refuse_nesting(units)
    groups: list[tuple[set[object], list[str]]] = []
    for name, unit in units.items():
        held: set[object] = {unit, *(parameter for parameter in unit.parameters() if parameter not in excluded)}
        names = [name]
        for group in [group for group in groups if group[0] & held]:
            groups.remove(group)
            held |= group[0]
            names = [*group[1], *names]
        groups.append((held, names))
    order = {name: position for position, name in enumerate(units)}
    return sorted((sorted(names, key=order.__getitem__) for _, names in groups), key=lambda names: order[names[0]])


def _refuse_nesting(units: Mapping[str, nn.Module]) -> None:
    name_of = {unit: name for name, unit in units.items()}
    for name, unit in units.items():
        for child in unit.modules():
            if child is not unit and child in name_of:
                raise ConfigurationError(f"unit {name} contains unit {name_of[child]}; units must not be nested")


class NotedAllGather:
    """For ``FSDPModule.set_custom_all_gather``: gathers as FSDP2 does by itself, and keeps the work handle."""

    def __init__(self) -> None:
        self._work: dist.Work | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers ``input_tensor`` of all ranks into ``output_tensor``."""
        self._work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return self._work

    def take_work(self) -> dist.Work | None:
        """That of the latest gather, once; None if it has ended already or there was none."""
        work, self._work = self._work, None
        return work
