"""Hooks on units that gather parameters when they are needed, and may free them afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_pp.sharding._torch_private import backward_pass, call_after_backward, next_node_number, nodes_made_since
from lightning_pp.sharding.units.collective_times import CollectiveClock
from lightning_pp.sharding.units.group import UnitGroup
from lightning_pp.sharding.units.windows import UnitWindows
from lightning_pp.split.data.tree import map_leaves, tensors_of


class GatherOnUse:
    """Gathers a group before its units are called and before their backward.

    With ``free_after_use`` it frees a group as soon as its call or its backward is over, unless the program holds it.
    While there are :attr:`windows`, they decide what to gather ahead and what to free.
    A checkpoint that runs a unit again does so within the unit's backward, and finds it gathered. Inputs and outputs
    are cast as the policy says.

    Args:
        free_after_use: Keep one unit at a time.
        mp_policy: dtypes of inputs and outputs.
        clock: Looks, whenever a unit is used, which collectives have ended.
    """

    def __init__(self, *, free_after_use: bool, mp_policy: MixedPrecisionPolicy, clock: CollectiveClock) -> None:
        self._clock = clock
        self.is_paused = False
        self.windows: UnitWindows | None = None
        self._free_after_use = free_after_use
        self._mp_policy = mp_policy
        # in the order of gathering
        self._in_use: dict[UnitGroup, None] = {}
        self._backward_pass: int | None = None

    def attach(self, group: UnitGroup, modules: Iterable[nn.Module]) -> None:
        """Watches the calls of ``modules``, the units of ``group``."""
        for module in modules:
            call = _UnitCall()
            module.register_forward_pre_hook(partial(self._before_call, group, call), prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(self._after_call, group, call))

    def free(self, group: UnitGroup) -> None:
        """Frees ``group`` whether or not it is in use."""
        group.free()
        self._in_use.pop(group, None)

    def reset(self) -> None:
        """Forgets a step that failed."""
        self._backward_pass = None
        self.windows = None

    def _before_call(
        self, group: UnitGroup, call: _UnitCall, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.is_paused:
            self._use(group)
            group.reveal()
            if backward_pass() is not None:  # a checkpoint runs the unit again
                self._free_all_after_backward()
        call.first_node = next_node_number()
        dtype = self._mp_policy.param_dtype
        if dtype is None or not self._mp_policy.cast_forward_inputs:
            return None
        return _cast(args, dtype), _cast(kwargs, dtype)

    def _after_call(self, group: UnitGroup, call: _UnitCall, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.is_paused and backward_pass() is None:
            if torch.is_grad_enabled():
                before = partial(_call_if_alive, WeakMethod(self._before_backward), ref(group))
                for node in nodes_made_since(call.first_node, tensors_of(output)):
                    node.register_prehook(before)
            self._free_if_done(group)
        if not self.is_paused and self._mp_policy.param_dtype is not None:
            group.conceal()
        dtype = self._mp_policy.output_dtype
        return output if dtype is None else _cast(output, dtype)

    def _before_backward(self, group: UnitGroup, gradients: tuple[Tensor, ...]) -> None:
        """Runs before the first node of a unit's call in backward.

        Autograd visits the nodes of one device in the reverse order of their making, as far as dependencies allow. So
        all nodes of later calls have been visited, and whatever else is gathered can go. (A function in the graph at
        the inputs of a unit, as FSDP2 has it, would tell the same, but forbids editing the inputs in place.)
        """
        self._free_all_after_backward()
        for other in list(self._in_use):
            if other is not group:
                self._free_if_done(other)
        self._use(group)
        if self._mp_policy.param_dtype is not None:
            group.conceal()

    def _free_all_after_backward(self) -> None:
        current = backward_pass()
        if self._free_after_use and current != self._backward_pass:
            self._backward_pass = current
            call_after_backward(self._after_backward)

    def _after_backward(self) -> None:
        self._backward_pass = None
        for group in list(self._in_use):
            self._free_if_done(group)

    def _use(self, group: UnitGroup) -> None:
        self._clock.look()
        if self.windows is not None:
            self.windows.use(group)
        group.gather()
        self._in_use[group] = None

    def _free_if_done(self, group: UnitGroup) -> None:
        if self._free_after_use and self.windows is None and not group.held_by:
            self.free(group)


def _call_if_alive(method: WeakMethod[Any], group: ref[UnitGroup], gradients: tuple[Tensor, ...]) -> None:
    """A graph may outlive the training, by a loss that a unit keeps in an attribute, and keeps nothing else alive."""
    before_backward, its = method(), group()
    if before_backward is not None and its is not None:
        before_backward(its, gradients)


class _UnitCall:
    """The data from the hook before a call for the hook after it."""

    first_node = 0


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with its floating-point tensors cast to ``dtype``."""
    return map_leaves(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )
