"""What the strategy's ``activation_checkpointing=`` means for a model."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning._torch_private import OPERATION_TYPES
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.split.head.parts import HeadPart
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.unit_calls.selective_policy import Policy
from lightning_pp.split.unit_calls.units import is_block_list

AUTO = "auto"
"""As few blocks as ``device_memory_gib`` asks for."""
ActivationCheckpointing = bool | str | Sequence[Any] | Callable[..., Any]


def check_activation_checkpointing(value: ActivationCheckpointing) -> None:
    """Raises :class:`ConfigurationError` unless it is a bool, patterns, operations or a policy."""
    are_operations = _is_list(value) and all(isinstance(item, OPERATION_TYPES) for item in value)
    if isinstance(value, (bool, str)) or callable(value) or _are_patterns(value) or are_operations:
        return
    raise ConfigurationError(
        f"activation_checkpointing={value!r} must be True, 'auto', a list of names or patterns of units, a list of "
        "operations whose outputs are saved (torch.ops.aten.mm.default, ...), or a policy function for "
        "torch.utils.checkpoint.create_selective_checkpoint_contexts."
    )


def policy_of(value: ActivationCheckpointing) -> Policy | None:
    """What units that are run again save even so, if the strategy's argument says it."""
    if isinstance(value, (bool, str)) or not value or _are_patterns(value):
        return None
    return list(value) if _is_list(value) else value  # type: ignore[return-value]


def recomputation_of(
    value: ActivationCheckpointing, module: nn.Module, units: Mapping[str, nn.Module], record: StepRecord
) -> Recomputation | None:
    """The units that are run again in backward; None for none.

    Args:
        value: The strategy's argument.
        module: The whole model.
        units: All its units.
        record: The dry run of a training step.

    Raises:
        ConfigurationError: A pattern matches no unit; there are no repeated blocks; a unit is checkpointed already.
    """
    if value is False or (_is_list(value) and not value):
        return None
    policy = policy_of(value)
    if isinstance(value, str) or _are_patterns(value):
        names = _matching([value] if isinstance(value, str) else list(value), units)  # type: ignore[arg-type]
    else:
        names = _repeated(module, units)
    for call in record.calls:
        if call.unit in names and (call.region is not None or call.num_regions_inside):
            raise ConfigurationError(
                f"The model already checkpoints the unit {call.unit!r} itself, and activation_checkpointing would run "
                "it a third time. Turn one of the two off: gradient_checkpointing_disable() for a model of "
                "transformers, or leave activation_checkpointing out."
            )
    return Recomputation(names, policy)


def _matching(patterns: Sequence[str], units: Mapping[str, nn.Module]) -> set[str]:
    names: set[str] = set()
    for pattern in patterns:
        matched = [
            name
            for name, unit in units.items()
            if any(fnmatch.fnmatchcase(around, pattern) for around in _around(name, unit))
        ]
        if not matched:
            close = difflib.get_close_matches(pattern, units, n=5, cutoff=0.3) or list(units)[:5]
            raise ConfigurationError(
                f"activation_checkpointing={pattern!r} matches none of the {len(units)} units. The closest names are: "
                f"{', '.join(close)}."
            )
        names.update(matched)
    return names


def _repeated(module: nn.Module, units: Mapping[str, nn.Module]) -> set[str]:
    """The units that are one of a list of blocks of one class, or lie in one."""
    blocks = {child for parent in module.modules() if is_block_list(parent) for child in parent.children()}
    modules = dict(module.named_modules(remove_duplicate=False))
    names = {name for name, unit in units.items() if any(modules.get(one) in blocks for one in _around(name, unit))}
    if not names:
        raise ConfigurationError(
            f"activation_checkpointing=True applies to repeated blocks, but {type(module).__name__} has none among "
            f"its units ({', '.join(list(units)[:5])}). Name units: activation_checkpointing=['...']."
        )
    return names


def _around(name: str, unit: nn.Module) -> list[str]:
    """``name``, and the modules that the unit lies in, from the inside out; a part of a head lies in the head."""
    parts = (unit.head_name if isinstance(unit, HeadPart) else name).split(".")
    return [name, *(".".join(parts[:number]) for number in range(len(parts), 0, -1))]


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _are_patterns(value: Any) -> bool:
    return _is_list(value) and all(isinstance(item, str) for item in value)
