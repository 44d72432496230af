"""An update by an optimizer that can be undone, and made again with other gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pp.sharding._torch_private import copy_all_
from lightning_pp.sharding.units.flat import gradient_like, local_tensor


class UndoableUpdate:
    """Keeps an optimizer's parameters, gradients, states and groups from before its update; of DTensors the shards.

    The copies take as much memory as parameters, gradients and states of the rank; they are made once.
    """

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._before: list[dict[str, Any]] = []
        self._after: list[dict[str, Any]] = []

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> None:
        """Before the update, which follows at once."""
        self._optimizer = optimizer
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters = [parameter for parameter in held if parameter.grad is not None]
        self._states = {parameter: dict(kept) for parameter, kept in optimizer.state.items()}
        in_states = (value for kept in self._states.values() for value in kept.values() if isinstance(value, Tensor))
        self._originals = [*map(local_tensor, self._parameters), *map(local_tensor, in_states)]
        self._copies = _copied(self._originals, self._copies)
        gradients = [local_tensor(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self._gradients = _copied(gradients, self._gradients)
        self._before = _settings(optimizer)

    def end(self) -> None:
        """After the update."""
        assert self._optimizer is not None
        self._after = _settings(self._optimizer)

    def tensors(self) -> Iterator[Tensor]:
        """All that the update has read or written, and not only what it had before; of DTensors the shards."""
        assert self._optimizer is not None
        for parameter in self._parameters:
            yield local_tensor(parameter)
            if parameter.grad is not None:
                yield local_tensor(parameter.grad)
            for value in self._optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    yield local_tensor(value)

    @torch.no_grad()
    def make_again(self, prepare: Callable[[list[nn.Parameter]], bool]) -> None:
        """Undoes the update, and makes it again; gradients that are gone by now are gone afterwards.

        What has been changed in the optimizer's groups since the update, as by a scheduler, stays changed.

        Args:
            prepare: Is called with the parameters when they have their gradients; whether to make an update.
        """
        optimizer = self._optimizer
        assert optimizer is not None
        now = _settings(optimizer)
        self.undo()
        gone = [parameter for parameter in self._parameters if parameter.grad is None]
        for parameter, copy in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient_like(parameter, copy)
            else:
                local_tensor(parameter.grad).copy_(copy)
        if prepare(self._parameters):
            optimizer.step()
        for group, present, after in zip(optimizer.param_groups, now, self._after, strict=True):
            group.update({key: value for key, value in present.items() if after.get(key) != value})
        for parameter in gone:
            parameter.grad = None

    @torch.no_grad()
    def undo(self) -> None:
        """Puts back parameters, states and groups."""
        optimizer = self._optimizer
        assert optimizer is not None
        for parameter in [parameter for parameter in optimizer.state if parameter not in self._states]:
            del optimizer.state[parameter]
        for parameter, before in self._states.items():
            kept = optimizer.state[parameter]
            for name in set(kept) - set(before):
                del kept[name]
            kept.update(before)
        if self._originals:
            copy_all_(self._originals, self._copies)
        for group, values in zip(optimizer.param_groups, self._before, strict=True):
            group.update(values)

    def forget(self) -> None:
        """Frees the copies."""
        self.__init__()  # type: ignore[misc]


def _copied(tensors: list[Tensor], copies: list[Tensor]) -> list[Tensor]:
    """Copies of ``tensors``, in the memory of earlier ``copies`` where those are alike."""
    kinds = [[(each.shape, each.dtype, each.device) for each in some] for some in (tensors, copies)]
    if kinds[0] != kinds[1]:
        return [tensor.clone() for tensor in tensors]
    if tensors:
        copy_all_(copies, tensors)
    return copies


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
