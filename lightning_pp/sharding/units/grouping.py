"""Which units are sharded together, and which parameters cannot be sharded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_pp.errors import ConfigurationError


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
