"""Several optimizers as one: Lightning's automatic optimization takes one, and some optimizers take matrices only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError


class CombinedOptimizer(Optimizer):
    """One optimizer made of several, each of which updates the parameters that it holds.

    For example ``CombinedOptimizer(Muon(matrices, lr=0.02), AdamW(others, lr=3e-4))``.

    Its parameter groups are those of the optimizers, in their order; an entry ``"optimizer"`` of a group is the place
    of its optimizer. Schedulers, clipping and checkpoints see the groups of one optimizer. It also works without a
    pipeline.

    Args:
        optimizers: Of torch, or like those: ``step`` takes the gradients as they are. Each has parameters of its own.

    Raises:
        ConfigurationError: None is given, or two of them hold the same parameter.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ConfigurationError("CombinedOptimizer got no optimizer. Give it at least one.")
        groups = []
        for place, each in enumerate(optimizers):
            for group in each.param_groups:
                group["optimizer"] = place
                groups.append(group)
        try:
            super().__init__(groups, {})
        except ValueError as error:
            raise ConfigurationError(
                f"CombinedOptimizer cannot combine {', '.join(type(each).__name__ for each in optimizers)}: {error}. "
                "Give each parameter to one optimizer."
            ) from None
        self.optimizers = optimizers
        for each in optimizers:
            self.state.update(each.state)

    def __getstate__(self) -> dict[str, Any]:
        """What copies have: the same optimizers, with settings and state of their own."""
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter by its optimizer, one optimizer after the other.

        Args:
            closure: Evaluates the step once, before the first update.

        Returns:
            What ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for place, each in enumerate(self.optimizers):
            groups = [group for group in self.param_groups if group["optimizer"] == place and group["params"]]
            if groups:
                each.param_groups, each.state = groups, self.state
                each.step()
        return loss
