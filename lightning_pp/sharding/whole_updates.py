"""Updates by optimizers that may need whole tensors: each sharded parameter is updated whole, by one rank.

What an optimizer does to a matrix may depend on all of it, as with Muon, Shampoo and Adafactor. Of a class of user code
nothing is known. So each sharded parameter has an owner among the ranks that hold its shards::

    before the update    all: send shards of parameters and gradients to the owners
    update               each: step over what it owns, whole, and over parameters that are not sharded
    after the update     each: send new values of what it owns to all, in shards

The state of a parameter stays whole with its owner. ``state_dict()`` brings it to all ranks first, in shards or else
copies, as checkpoints need it. The next update collects it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pp.sharding._torch_private import call_first_after_update, dtensor_of
from lightning_pp.sharding.units.flat import gradient_like, local_tensor
from lightning_pp.sharding.units.one_owner import chunk_of, gather_to, group_of, scatter_from


class WholeUpdates:
    """The hooks of an optimizer that show it whole parameters.

    Args:
        optimizer: It may hold other optimizers, whose groups or state it may share.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._owners = WeakIdKeyDictionary()
        self._whole = WeakIdKeyDictionary()  # one object for each parameter: user code may have a dict of its own
        self._loads: dict[int, int] = {}
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._updated: list[Any] = []
        self._depth = 0  # a step may call that of its base class
        self._is_spread = True
        # its train() and eval() change weights by the state, between updates
        self._spreads_always = callable(getattr(optimizer, "eval", None))
        optimizer.register_step_pre_hook(self._before)
        call_first_after_update(optimizer, self._after)
        optimizer.register_state_dict_pre_hook(self.spread)

    def _before(
        self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Runs the closure, whose loss the step gets, and then lets whole parameters in; nothing without shards."""
        self._depth += 1
        if self._depth > 1 or not self._assigned(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._let_in(optimizer)
        if closure is None:
            return None
        return (args[0], lambda: loss, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _let_in(self, optimizer: Optimizer) -> None:
        self._updated = self._assigned(optimizer)
        self._collect(optimizer)
        waits = []
        for parameter in self._updated:
            owner, gradient = self._owners[parameter], parameter.grad
            values = gather_to(parameter, local_tensor(parameter), owner)
            gradients = None if gradient is None else gather_to(parameter, local_tensor(gradient), owner)
            waits.append((parameter, values, gradients))
        for parameter, values, gradients in waits:
            value, gradient = values(), None if gradients is None else gradients()
            if value is not None:
                if parameter not in self._whole:
                    self._whole[parameter] = nn.Parameter(value)
                whole = self._whole[parameter]
                whole.data = value
                if gradient is not None and gradient.dtype != value.dtype:
                    whole.grad_dtype = gradient.dtype
                whole.grad = gradient
        self._put_in(optimizer)

    def _put_in(self, optimizer: Optimizer) -> None:
        """Whole parameters into groups and as keys of the state. Of what others own nothing is there."""
        for group in _groups_of(optimizer):
            kept: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
            own = [self._whole_if_own(parameter) for parameter in kept["params"]]
            self._groups.append((group, kept))
            for key, values in kept.items():
                those = own if key == "params" else values
                group[key] = [value for value, mine in zip(those, own, strict=True) if mine is not None]
        for state in _states_of(optimizer):
            for parameter in self._updated:
                if parameter in state:
                    state[self._whole[parameter]] = state.pop(parameter)

    def _whole_if_own(self, parameter: Any) -> Any:
        if not isinstance(parameter, DTensor):
            return parameter
        is_own = parameter.requires_grad and self._owners[parameter] == group_of(parameter).rank()
        return self._whole[parameter] if is_own else None

    def _after(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth:
            return
        with torch.no_grad():
            waits = []
            for parameter in self._updated:
                whole = self._whole_if_own(parameter)
                value = None if whole is None else whole.detach()
                waits.append(scatter_from(parameter, value, local_tensor(parameter), self._owners[parameter]))
            for wait in waits:
                wait()
        groups = [group for group, _ in self._groups]  # of which empty ones are hidden still
        self.put_back(optimizer)
        self._is_spread = False
        if self._spreads_always:
            self._spread(optimizer, groups)

    def put_back(self, optimizer: Optimizer) -> None:
        """DTensors into groups and state again, also after an update that failed; twice does no harm."""
        self._depth = 0
        for group, kept in self._groups:
            group.update(kept)
        for state in _states_of(optimizer):
            for parameter in self._updated:
                if parameter in self._whole and self._whole[parameter] in state:
                    state[parameter] = state.pop(self._whole[parameter])
        for parameter in self._updated:
            if parameter in self._whole:
                whole = self._whole[parameter]
                whole.grad, whole.data = None, whole.data.new_empty(0)
        self._groups, self._updated = [], []

    def _assigned(self, optimizer: Optimizer) -> list[Any]:
        """Trainable sharded parameters. A new one goes to the rank that owns least, and stays there."""
        found: dict[int, Any] = {}
        for group in _groups_of(optimizer):
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and parameter.requires_grad:
                    found[id(parameter)] = parameter
        for parameter in sorted(found.values(), key=Tensor.numel, reverse=True):
            if parameter not in self._owners:
                ranks = range(group_of(parameter).size())
                owner = min(ranks, key=lambda rank: self._loads.get(rank, 0))
                self._owners[parameter] = owner
                self._loads[owner] = self._loads.get(owner, 0) + parameter.numel()
        return list(found.values())

    def _collect(self, optimizer: Optimizer) -> None:
        """Brings state that is on all ranks, as of a checkpoint, to the owners."""
        for state in _states_of(optimizer):
            for parameter in self._updated:
                if parameter not in state:
                    continue
                owner, whole = self._owners[parameter], {}
                for key, value in state[parameter].items():
                    if isinstance(value, DTensor) and value.placements == parameter.placements:
                        value = gather_to(parameter, local_tensor(value), owner)()
                    whole[key] = local_tensor(value) if isinstance(value, DTensor) else value
                if owner == group_of(parameter).rank():
                    state[parameter] = whole
                else:
                    del state[parameter]

    def spread(self, optimizer: Optimizer) -> None:
        """Brings state and settings of groups from their owners to all ranks."""
        if not self._is_spread:
            self._spread(optimizer, _groups_of(optimizer))

    @torch.no_grad()
    def _spread(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        self._is_spread = True
        held = [parameter for each in groups for parameter in each["params"]]
        sharded = [parameter for parameter in held if parameter in self._owners]  # also those that were trained before
        if not sharded:
            return
        group, rank = group_of(sharded[0]), group_of(sharded[0]).rank()
        states = list(_states_of(optimizer))
        own = {
            (place, number): {key: _described(value) for key, value in state[parameter].items()}
            for place, state in enumerate(states)
            for number, parameter in enumerate(sharded)
            if self._owners[parameter] == rank and parameter in state and not _is_everywhere(state[parameter])
        }
        told: list[Any] = [None] * group.size()
        dist.all_gather_object(told, (own, [_settings(each) for each in groups]), group=group)
        for place, state in enumerate(states):
            for number, parameter in enumerate(sharded):
                described = told[self._owners[parameter]][0].get((place, number))
                kept = state.pop(parameter, None)  # in one order on all ranks
                if described is not None:
                    state[parameter] = self._from_owner(parameter, described, kept or {})
                elif kept is not None:
                    state[parameter] = kept
        for number, each in enumerate(groups):
            trained = [parameter for parameter in each["params"] if parameter.requires_grad]
            if trained and all(parameter in self._owners for parameter in trained):
                each.update(told[self._owners[trained[0]]][1][number])

    def _from_owner(self, parameter: Any, described: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter as its owner has it, with this rank's shards."""
        group, owner, found = group_of(parameter), self._owners[parameter], {}
        mesh = parameter.device_mesh
        for key, value in described.items():
            if not isinstance(value, _Tensor):
                found[key] = value
                continue
            whole = own[key] if owner == group.rank() else value.empty_on(local_tensor(parameter).device)
            whole = whole.detach().contiguous()
            if whole.numel():
                dist.broadcast(whole.view(-1).view(torch.uint8), group_src=owner, group=group)
            if whole.dim() == 0:
                found[key] = whole
            elif whole.shape == parameter.shape:
                found[key] = gradient_like(parameter, chunk_of(parameter, whole).clone())
            else:
                found[key] = dtensor_of(whole, mesh, [Replicate()] * mesh.ndim, whole.shape, whole.stride())
        return found


class _Tensor:
    """The shape and dtype of a tensor on another rank."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype, self._is_on_host = tensor.shape, tensor.dtype, tensor.device.type == "cpu"

    def empty_on(self, device: torch.device) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device="cpu" if self._is_on_host else device)


def _described(value: Any) -> Any:
    """A plain tensor by its shape; all else, tensors of other classes too, is sent as it is."""
    return _Tensor(value) if type(value) in (Tensor, nn.Parameter) else value


def _is_everywhere(values: dict[str, Any]) -> bool:
    return any(isinstance(value, DTensor) for value in values.values())


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _find_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """It and those that it holds, as one that wraps another does."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from _find_optimizers(value)


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups = [group for each in _find_optimizers(optimizer) for group in each.param_groups]
    return list({id(group): group for group in groups}.values())


def _states_of(optimizer: Optimizer) -> list[Any]:
    """The dicts of states, each once."""
    return list({id(each.state): each.state for each in _find_optimizers(optimizer)}.values())
