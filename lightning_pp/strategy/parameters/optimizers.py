"""The one optimizer of a pipeline: made as on one device, then reduced to the parameters that a rank owns."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_pp.checkpoint.ownership.catalog import OptimizerGroups
from lightning_pp.checkpoint.ownership.rank_part import shard_like
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.strategy._lightning_private import NoOptimizer


def set_up_one_optimizer(strategy: Strategy, trainer: pl.Trainer) -> None:
    """Calls ``configure_optimizers``; raises :class:`ConfigurationError` unless that returns one first-order one."""
    try:
        strategy.setup_optimizers(trainer)
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        # Lightning's own advice, manual optimization, is none for a pipeline
        raise ConfigurationError(
            f"configure_optimizers of {type(strategy.lightning_module).__name__} returned several optimizers, but a "
            "pipeline steps exactly one. Return lightning_pp.CombinedOptimizer(first, second), or give one optimizer "
            "several parameter groups."
        ) from None
    for optimizer in strategy.optimizers:
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS evaluates the step several times and needs all parameters at once, but a stage has only its "
                "own. Use a first-order optimizer (AdamW, SGD, ...)."
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step needs a closure to evaluate the loss again at other weights, but a "
                "pipeline runs one forward and backward per step. Use an optimizer whose step takes the gradients as "
                "they are (AdamW, SGD, ...)."
            )


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


def training_ones(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Without what Lightning puts where ``configure_optimizers`` returns None."""
    return [optimizer for optimizer in optimizers if not isinstance(optimizer, NoOptimizer)]


class KeptOptimizers:
    """Optimizers that user code keeps, and returns from ``configure_optimizers`` again and again.

    One that was made in ``__init__`` holds the parameters that the module had before it was cut and sharded; one that
    has trained holds those of this rank only. Each is brought to hold all parameters as they are now.
    """

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[Optimizer, OptimizerGroups] = WeakKeyDictionary()
        # the user's own names, of an optimizer made from named_parameters()
        self._labels: WeakKeyDictionary[Optimizer, list[list[str]]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[KeptOptimizers], tuple[()]]:
        """A copy of the trainer has other optimizers, of which it knows nothing."""
        return KeptOptimizers, ()

    def complete(self, optimizers: Sequence[Optimizer], split: SplitModel) -> None:
        """To be called while all names are parameters; the groups hold all of theirs afterwards.

        Raises:
            ConfigurationError: An optimizer holds a parameter that is not the module's.
        """
        fake_parameters = split.fake_parameters
        current = dict(fake_parameters.module.named_parameters())
        for optimizer in optimizers:
            if optimizer in self._groups:
                kept = self._groups[optimizer], self._labels[optimizer]
                for group, names, labels in zip(optimizer.param_groups, *kept, strict=False):
                    group["params"][:] = [current[name] for name in names]
                    if labels:
                        group["param_names"][:] = labels
            _replace_originals(optimizer, split, current)
            _refuse_strangers(optimizer, fake_parameters.module, current)

    def note(self, optimizers: Sequence[Optimizer], groups: Sequence[OptimizerGroups]) -> None:
        """Remembers the canonical names that each optimizer has in its groups, before others' parameters go."""
        self._groups.update(zip(optimizers, groups, strict=True))
        for optimizer in optimizers:
            self._labels[optimizer] = [list(group.get("param_names", ())) for group in optimizer.param_groups]

    def make_whole(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        """Gives each optimizer the parameters of the whole module, without state, for the next trainer."""
        current = dict(module.named_parameters())
        for optimizer in optimizers:
            optimizer.state.clear()
            for group, names in zip(optimizer.param_groups, self._groups.pop(optimizer, ()), strict=False):
                group["params"][:] = [current[name] for name in names]


def _replace_originals(optimizer: Optimizer, split: SplitModel, current: Mapping[str, nn.Parameter]) -> None:
    """Replaces parameters that the module had before it was cut; their state comes along, in this rank's shards."""
    state: Any = optimizer.state
    parts = split.tensor_parts
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            name = split.fake_parameters.name_of_original(parameter)
            if name is None or name not in current or current[name] is parameter:
                continue
            group["params"][index] = current[name]
            kept = state.pop(parameter, None)
            if kept is not None and not is_fake(current[name]):
                state[current[name]] = shard_like(kept, current[name], parts.get(name))


def _refuse_strangers(optimizer: Optimizer, module: nn.Module, current: Mapping[str, nn.Parameter]) -> None:
    known = {id(parameter) for parameter in current.values()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if shapes := [tuple(parameter.shape) for parameter in held if id(parameter) not in known]:
        raise ConfigurationError(
            f"configure_optimizers of {type(module).__name__} returned {type(optimizer).__name__} with {len(shapes)} "
            f"parameters that are not the module's, of shapes {', '.join(map(str, shapes[:5]))}. A pipeline moves and "
            "shards parameters by their names in the module. Make them parameters of the module (self.name = "
            "nn.Parameter(...)), and make the optimizer from self.parameters()."
        )
