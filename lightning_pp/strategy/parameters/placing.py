"""Allocates this rank's parameters on its device: whole ones at once, sharded ones unit by unit."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.sharding.gradients.hooks import refuse_hooks
from lightning_pp.sharding.gradients.replicated import broadcast_values
from lightning_pp.sharding.units.group import never_sharded
from lightning_pp.sharding.units.host_memory import return_freed_memory
from lightning_pp.split.fakes.materialize import materialize_parameters, without_parameters


class ParameterPlacing:
    """Allocates this rank's parameters on its device, with one value on all ranks of the same stages.

    Units that are going to be sharded, or cut over tensor ranks, get it one after the other, right before they are, so
    that no more than one of them is whole at a time.

    Args:
        split: The split model, without what other ranks hold.
        units: This rank's units, if they are going to be sharded or cut; none if not.
        whole: Canonical names of parameters in them that are not, since they are used outside their unit.
        device: Where this rank computes.
        group: The replicas, with their tensor ranks.
        is_sharded: Whether units are going to be sharded, and not cut alone.
    """

    def __init__(
        self,
        split: SplitModel,
        units: Mapping[str, nn.Module],
        whole: Collection[str],
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        is_sharded: bool,
    ) -> None:
        self._module = split.module
        self._tensor, self._parts, self._is_sharded = split.tensor, split.tensor_parts, is_sharded
        self._canonical_names = split.fake_parameters.canonical_names
        self._device = device
        self._group = group
        without_rows = set(never_sharded(units))
        self._sharded = {
            name: parameter
            for name, parameter in self._named_parameters(units)
            if name not in whole and parameter not in without_rows
        }

    def place_whole(self, owned: Collection[str]) -> None:
        """Buffers, metrics and the parameters of ``owned`` that are not going to be sharded.

        Raises:
            ConfigurationError: A parameter of a class that is made for FSDP's gathers is not going to be sharded.
        """
        for name, parameter in self._module.named_parameters():
            is_sharded = any(parameter is sharded for sharded in self._sharded.values())
            if hasattr(type(parameter), "fsdp_pre_all_gather") and not is_sharded:
                raise ConfigurationError(
                    f"The parameter {name} is a {type(parameter).__name__} for FSDP2's all-gathers, but it is not "
                    "sharded here. With torchao, set enable_fsdp_float8_all_gather=False. To keep it, set "
                    "data_parallel_size to 2 or more, and sharding='shard_grad_op' or 'full_shard'."
                )
        materialize_parameters(self._module, set(owned).difference(self._sharded), self._device)
        with without_parameters(self._module, set(self._sharded.values())):
            self._module.to(self._device)
            broadcast_values([*self._module.parameters(), *self._module.buffers()], self._group)

    @torch.no_grad()
    def place_units(self, units: Mapping[str, nn.Module]) -> None:
        """The parameters of ``units`` that are going to be sharded, which is to happen next, and cut here."""
        return_freed_memory()  # of the units before these
        names = {name for name, _ in self._named_parameters(units) if name in self._sharded}
        materialize_parameters(self._module, names, self._device)
        parameters = {name: parameter for name, parameter in self._named_parameters(units) if name in names}
        for name, parameter in parameters.items():
            del self._sharded[name]  # with which the whole parameter would live on
            if name in self._parts:
                refuse_hooks(name, parameter, "is cut over tensor ranks, and the hook would see a part of its gradient")
            elif self._is_sharded:
                refuse_hooks(name, parameter)
            parameter.data = parameter.data.to(self._device)
        broadcast_values(parameters.values(), self._group)
        del parameters
        if self._tensor is not None:
            for name in units:
                self._tensor.cut(name)

    def _named_parameters(self, units: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
        return [
            (self._canonical_names[name], parameter)
            for unit, module in units.items()
            for name, parameter in module.named_parameters(unit, remove_duplicate=False)
        ]
