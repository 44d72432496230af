"""The one optimizer of a pipeline: made as on one device, then cut down to what a rank owns."""

from __future__ import annotations

import inspect
from collections.abc import Collection, MutableMapping, Sequence
from itertools import compress

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pp.errors import ConfigurationError
from lightning_pp.strategy._lightning_private import NoOptimizer


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


class OriginalParameters:
    """The module's parameters before it was split, which an optimizer made in ``__init__`` holds.

    Args:
        module: The whole module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: MutableMapping[nn.Parameter, str] = WeakIdKeyDictionary()
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    def replace_in(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        """Puts what stands for them now in their places; to be called while all names are parameters."""
        current = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for place, parameter in enumerate(group["params"]):
                    name = self._names.get(parameter)
                    if name is not None and current[name] is not parameter:
                        group["params"][place] = current[name]
                        optimizer.state.pop(parameter, None)


class WholeGroups:
    """The parameter groups of optimizers as one device would have them, by name, while each rank's hold its own part.

    Args:
        optimizers: With all parameters, as are those of ``module``.
        module: While all names are parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._names = [
            [[names[id(parameter)] for parameter in group["params"] if id(parameter) in names] for group in groups]
            for groups in (optimizer.param_groups for optimizer in optimizers)
        ]
        # the user's own names, of an optimizer made from named_parameters()
        self._labels = [
            [list(group.get("param_names", ())) for group in optimizer.param_groups] for optimizer in optimizers
        ]

    def fill(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        """Puts all parameters back into the groups; to be called while all names are parameters."""
        parameters = dict(module.named_parameters())
        for optimizer, names, labels in zip(optimizers, self._names, self._labels, strict=True):
            for group, its_names, its_labels in zip(optimizer.param_groups, names, labels, strict=False):
                if its_names:
                    group["params"][:] = [parameters[name] for name in its_names]
                if its_labels:
                    group["param_names"][:] = its_labels


def steps_nothing(optimizer: Optimizer) -> bool:
    """Whether it stands for no optimizer: ``configure_optimizers`` returned None."""
    return isinstance(optimizer, NoOptimizer)


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
