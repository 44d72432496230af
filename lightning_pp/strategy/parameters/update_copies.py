"""Undoing an update of an optimizer: what it writes into, as it was before."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Settings = list[dict[str, Any]]
"""The settings of an optimizer's groups: learning rates and the like, without the parameters."""


class BeforeUpdate:
    """Copies of what an update is about to write into: parameters, the optimizer's state of them, and gradients.

    Some optimizers write into gradients as well, as SGD's ``foreach`` way with ``nesterov`` does.

    They are exact for every optimizer that keeps what it knows in ``state`` and in the settings of its groups, as those
    of ``torch.optim`` do.

    Args:
        optimizer: With the gradients that it is to be stepped with; parameters without one are not written into.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._settings = settings_of(optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.gradients: list[tuple[nn.Parameter, Tensor]] = [(p, p.grad) for p in held]
        with torch.no_grad():
            self._values = [(parameter.clone(), gradient.clone()) for parameter, gradient in self.gradients]
            self._states = [_copied(optimizer.state.get(parameter)) for parameter in held]

    @property
    def are_settings_kept(self) -> bool:
        """Whether the groups have the settings that they had."""
        return settings_of(self._optimizer) == self._settings

    def undo(self) -> None:
        """Makes parameters, gradients and states what they were, in the same tensors."""
        state: Any = self._optimizer.state
        with torch.no_grad():
            for held, values, entries in zip(self.gradients, self._values, self._states, strict=True):
                parameter = held[0]
                for tensor, value in zip(held, values, strict=True):
                    tensor.copy_(value)
                if entries is None:
                    state.pop(parameter, None)
                    continue
                now = state[parameter]
                now.clear()
                for key, (kept, content) in entries.items():
                    now[key] = kept.copy_(content) if isinstance(kept, Tensor) else content

    def step_again(self) -> None:
        """Steps with the gradients that the parameters have now, and the settings of the time of the update."""
        now = settings_of(self._optimizer)
        _set(self._optimizer, self._settings)
        try:
            self._optimizer.step()
        finally:
            _set(self._optimizer, now)


def settings_of(optimizer: Optimizer) -> Settings:
    """The settings of its groups, as they are now."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def has_tensor_settings(optimizer: Optimizer) -> bool:
    """Whether a setting is a tensor, which a scheduler may write into."""
    return any(isinstance(value, Tensor) for settings in settings_of(optimizer) for value in settings.values())


def _set(optimizer: Optimizer, settings: Settings) -> None:
    for group, each in zip(optimizer.param_groups, settings, strict=True):
        group.update(each)


def _copied(state: Mapping[str, Any] | None) -> dict[str, tuple[Any, Any]] | None:
    """Each entry with a copy of what it holds; None for no state."""
    if not state:
        return None
    return {
        key: (value, value.clone() if isinstance(value, Tensor) else copy.deepcopy(value))
        for key, value in state.items()
    }
