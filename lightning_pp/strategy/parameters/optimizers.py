"""The one optimizer of a pipeline: made as on one device, then cut down to what a rank owns."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from itertools import compress

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_pp.errors import ConfigurationError


def set_up_one_optimizer(strategy: Strategy, trainer: pl.Trainer) -> None:
    """Calls ``configure_optimizers``; raises :class:`ConfigurationError` unless it gives one first-order optimizer."""
    try:
        strategy.setup_optimizers(trainer)
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        # Lightning's own advice, manual optimization, is none for a pipeline
        raise ConfigurationError(
            f"configure_optimizers of {type(strategy.lightning_module).__name__} returned several optimizers, and a "
            "pipeline steps exactly one. Give one optimizer several parameter groups instead."
        ) from None
    for optimizer in strategy.optimizers:
        if not isinstance(optimizer, LBFGS) and _needs_closure(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step needs a closure, which it calls to evaluate the step again at other "
                "weights; a pipeline has one forward and backward per step. Use an optimizer whose step takes the "
                "gradients as they are (AdamW, SGD, ...)."
            )
    if any(isinstance(optimizer, LBFGS) for optimizer in strategy.optimizers):
        raise ConfigurationError(
            "LBFGS evaluates the step several times and needs all parameters at once, and a stage has its own "
            "only; use a first-order optimizer (AdamW, SGD, ...)."
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether its step insists on a closure, which it calls to evaluate the step as often as it likes."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def keep_parameters(optimizers: Sequence[Optimizer], owned: Collection[nn.Parameter]) -> None:
    """Takes all but ``owned`` out of the optimizers' groups; the groups themselves stay, even empty ones."""
    ids = {id(parameter) for parameter in owned}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kept = [id(parameter) in ids for parameter in group["params"]]
            for key in ("params", "param_names"):
                if key in group:
                    group[key][:] = compress(group[key], kept)
        for parameter in [parameter for parameter in optimizer.state if id(parameter) not in ids]:
            del optimizer.state[parameter]
