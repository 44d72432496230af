"""The state of the unsplit module, and the pipeline ranks that hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import Module

if TYPE_CHECKING:
    from torch.optim import Optimizer

OptimizerGroups = tuple[tuple[str, ...], ...]
"""The parameter names of each parameter group of one optimizer."""


@dataclass(frozen=True)
class ParameterCatalog:
    """The state of the unsplit module by name; the same on every rank.

    Attributes:
        names: Every key of the unsplit module's ``state_dict()``, in its order: parameters, persistent buffers, extra
            state, and further names of tied parameters.
        owners: The pipeline ranks that hold the true value of each canonical name; the first of them saves it.
        shapes: The global shape of each canonical name that is a tensor; a name without one is extra state.
        canonical: For the further names of a tied parameter, its first name.
        optimizer_groups: For each optimizer, for each of its parameter groups, the canonical names of the parameters in
            the order that a single device would have them.
    """

    names: tuple[str, ...]
    owners: Mapping[str, tuple[int, ...]]
    shapes: Mapping[str, torch.Size]
    canonical: Mapping[str, str] = field(default_factory=dict)
    optimizer_groups: tuple[OptimizerGroups, ...] = ()

    @classmethod
    def from_module(cls, module: Module, owners: Callable[[str], Sequence[int]]) -> ParameterCatalog:
        """Read the catalogue off the unsplit module, which may be on the meta device.

        Args:
            module: The module with all its parameters.
            owners: The pipeline ranks that hold a canonical name; called once for each.
        """
        state = Module.state_dict(module, keep_vars=True)  # not one that user code overrides, which may give copies
        first_names: dict[int, str] = {}
        canonical: dict[str, str] = {}
        shapes: dict[str, torch.Size] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                first = first_names.setdefault(id(value), name)
                if first == name:
                    shapes[name] = value.shape
                else:
                    canonical[name] = first
        names = tuple(state)
        held = {name: tuple(owners(name)) for name in names if name not in canonical}
        return cls(names=names, owners=held, shapes=shapes, canonical=canonical)

    def with_optimizers(self, module: Module, optimizers: Sequence[Optimizer]) -> ParameterCatalog:
        """Add the groups of optimizers; all their parameters are those of the unsplit module."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        groups = tuple(
            tuple(tuple(names[parameter] for parameter in group["params"]) for group in optimizer.param_groups)
            for optimizer in optimizers
        )
        return replace(self, optimizer_groups=groups)

    @property
    def canonical_names(self) -> tuple[str, ...]:
        """The names without the further names of tied parameters, in order."""
        return tuple(name for name in self.names if name not in self.canonical)

    def canonical_name(self, name: str) -> str:
        """The first name of whatever ``name`` names."""
        return self.canonical.get(name, name)

    def saver(self, name: str) -> int:
        """The pipeline rank that saves ``name``, so that nothing is saved twice."""
        return self.owners[self.canonical_name(name)][0]
