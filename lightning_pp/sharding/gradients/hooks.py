"""Hooks that users register on parameters: each runs once a batch, on the gradient of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding._torch_private import gradient_hooks


@dataclass(frozen=True)
class _Held:
    """The hooks of a parameter, and the gradient that it had before the batch."""

    on_gradient: dict[int, Callable[[Tensor], Tensor | None]]
    after_accumulation: dict[int, Callable[[Tensor], None]]
    before: Tensor | None


class GradientHooks:
    """Defers the hooks of ``Tensor.register_hook`` and ``register_post_accumulate_grad_hook`` to the batch's end.

    Autograd would call them with the gradient of each microbatch, and a hook such as ``gradient.clamp(-1, 1)`` has
    another result then. As on one device they get the gradient of a batch, before it is reduced over replicas.
    Accumulated gradients of earlier batches are added afterwards.

    Args:
        parameters: Those of this rank, by name.
        shared: Those of several stages: each stage has only a part of their gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], shared: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(parameters.items())
        self._shared = set(shared)
        self._held: dict[nn.Parameter, _Held] = {}

    def begin(self) -> None:
        """Before a batch.

        Raises:
            ConfigurationError: A parameter with hooks is sharded, or belongs to several stages.
        """
        self.abandon()
        for name, parameter in self._parameters:
            on_gradient, after = gradient_hooks(parameter)
            if not on_gradient and not after:
                continue
            if isinstance(parameter, DTensor):
                refuse_hooks(name, parameter)
            if parameter in self._shared:
                refuse_hooks(name, parameter, "belongs to several stages, and each has only a part of its gradient")
            self._held[parameter] = _Held(dict(on_gradient), dict(after), parameter.grad)
            parameter.grad = None
            on_gradient.clear()
            after.clear()

    @torch.no_grad()
    def run(self, parameters: Iterable[nn.Parameter]) -> None:
        """Calls the hooks of ``parameters``, whose gradients of this batch are complete, and gives the hooks back."""
        for parameter in [each for each in parameters if each in self._held]:
            held = self._give_back(parameter)
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = held.before
                continue
            for hook in held.on_gradient.values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            parameter.grad = gradient if held.before is None else held.before.add_(gradient)
            for after in held.after_accumulation.values():
                after(parameter)

    def end(self) -> None:
        """After a batch: runs what :meth:`run` has not."""
        self.run(list(self._held))

    def abandon(self) -> None:
        """After a batch that failed: gives the hooks back."""
        for parameter in list(self._held):
            self._give_back(parameter)

    def _give_back(self, parameter: nn.Parameter) -> _Held:
        held = self._held.pop(parameter)
        on_gradient, after = gradient_hooks(parameter)
        on_gradient.update(held.on_gradient)
        after.update(held.after_accumulation)
        return held


def refuse_hooks(
    name: str,
    parameter: nn.Parameter,
    why: str = "is gathered from shards or cast for each use, and the hook would not be called",
) -> None:
    """Refuses a parameter that cannot have hooks.

    Raises:
        ConfigurationError: It has one.
    """
    for hook in [hook for hooks in gradient_hooks(parameter) for hook in hooks.values()]:
        code = getattr(hook, "__code__", None)
        where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
        raise ConfigurationError(
            f"A hook{where} waits for the gradient of the parameter {name}. The parameter {why}. Change gradients in "
            "on_before_optimizer_step instead."
        )
