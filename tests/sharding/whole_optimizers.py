"""Small optimizers of the kinds that need whole matrices, keep odd states, or change weights between updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Own(torch.optim.Optimizer):
    """Its step takes parameters one by one."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group)
        return loss

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Normalized(_Own):
    """A momentum scaled by the norm of the weight, as LARS does."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 0.3)
        parameter.add_(average / average.norm() * (1 + parameter.norm()), alpha=-group["lr"] / group["count"])


class Preconditioned(_Own):
    """Shampoo: roots of the sums of gradients' products, of rows and of columns."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        gradient = parameter.grad.reshape(parameter.shape[0], -1)
        for side, matrix in (("left", gradient), ("right", gradient.T)):
            if side not in state:
                state[side] = 0.1 * torch.eye(matrix.shape[0], dtype=matrix.dtype)
            state[side] += matrix @ matrix.T
        gradient = self.root(state["left"]) @ gradient @ self.root(state["right"])
        parameter.view_as(gradient).add_(gradient, alpha=-group["lr"])

    def root(self, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values**-0.25) @ vectors.T


class Quantized(_Own):
    """A momentum kept in bytes, with a scale for each four elements of the flat matrix."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        padding = -parameter.numel() % 4
        if "bytes" not in state:
            state["bytes"] = torch.zeros((parameter.numel() + padding) // 4, 4, dtype=torch.int8)
            state["scales"] = torch.zeros(len(state["bytes"]), 1, dtype=parameter.dtype)
        blocks = nn.functional.pad(parameter.grad.flatten(), (0, padding)).view(-1, 4)
        average = 0.7 * state["bytes"] * state["scales"] + 0.3 * blocks
        state["scales"] = average.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        state["bytes"] = (average / state["scales"]).round().to(torch.int8)
        step = (state["bytes"] * state["scales"]).flatten()[: parameter.numel()].view(parameter.shape)
        parameter.add_(step, alpha=-group["lr"])


class ScheduleFree(_Own):
    """Trains at a point between an average and the last iterate; ``eval()`` puts the average in place."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert group["is_training"], "train() has to be called first"
        iterate = state.setdefault("iterate", parameter.clone())
        share = 1 / group["count"]
        parameter.lerp_(iterate, share)
        parameter.add_(parameter.grad, alpha=-group["lr"] * 0.1)
        iterate.sub_(parameter.grad, alpha=group["lr"])

    def eval(self) -> None:
        self.swap(False, 1 - 1 / 0.9)

    def train(self) -> None:
        self.swap(True, 1 - 0.9)

    @torch.no_grad()
    def swap(self, is_training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group.get("is_training") != is_training:
                for parameter in group["params"]:
                    if "iterate" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["iterate"], weight)
            group["is_training"] = is_training


class GlobalScale(_Own):
    """Its rate is an estimate over all parameters, as Prodigy's; it keeps that in an attribute."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        self.distance, self.above, self.below = 1e-4, 0.0, 0.0

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first = state.setdefault("first", parameter.clone())
        self.above += self.distance * float((parameter.grad * (first - parameter)).sum())
        self.below += self.distance * float(parameter.grad.abs().sum())
        self.distance = max(self.distance, self.above / max(self.below, 1e-12))
        parameter.sub_(parameter.grad, alpha=self.distance * group["lr"])


class Derived(torch.optim.SGD):
    """Calls the step of its base, and then takes the mean of each tensor away."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.mean(), alpha=0.1)
        return loss


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, whose groups it shares, and goes half of the way; its step knows no closure."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        base.param_groups = self.param_groups
        base.state = self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [parameter / parameter.norm() for parameter in held]
        self.base.step()
        for parameter, first in zip(held, before, strict=True):
            parameter.lerp_(first, 0.5)
