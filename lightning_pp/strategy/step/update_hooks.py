"""Hooks of the module that see parameters: those that write into them, as the update of a momentum encoder does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim.swa_utils import AveragedModel

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.errors import ConfigurationError
from lightning_pp.split.data.tree import own_copy
from lightning_pp.split.dry_run.weight_updates import Updates, updates_by
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.strategy._lightning_private import results_of
from lightning_pp.strategy.lightning.patching import replaced
from lightning_pp.strategy.step.dry_steps import loggers_muted, logging_to
from lightning_pp.strategy.step.held_output import output_held

_BEFORE_ZERO_GRAD = "on_before_zero_grad"
_HOOKS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "on_train_batch_start": lambda batch: (batch, 0),
    _BEFORE_ZERO_GRAD: lambda batch: (None,),
    "on_after_backward": lambda batch: (),
    "on_train_batch_end": lambda batch: ({"loss": torch.zeros(())}, batch, 0),
}

_LOG_TRAINING = (*_HOOKS, "on_before_backward", "on_before_optimizer_step")
_OUTSIDE_STEPS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", *_LOG_TRAINING, "on_train_epoch_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_train_end"),
)


class UpdateHooks:
    """The hooks that write into parameters, found by running them on fakes.

    Only modules with parameters that do not train are looked at: an average of weights has no gradient. But
    ``on_before_zero_grad`` is always looked at: on one device it runs between forward and backward. A pipeline has no
    such moment, so it runs before both, and after both where it writes into parameters.

    Args:
        module: The user's module.
        fake_parameters: Knows all its parameters.
        batch: A batch to call hooks with.
    """

    def __init__(self, module: pl.LightningModule, fake_parameters: FakeParameters, batch: Any) -> None:
        self._module = module
        self._fake_parameters = fake_parameters
        self._names: list[str] = []
        self._postponed: list[Callable[[], Any]] = []
        updates: dict[str, frozenset[str]] = {}
        # all parameters of an AveragedModel require gradients
        has_averages = any(isinstance(child, AveragedModel) for child in module.modules())
        has_averages = has_averages or not all(parameter.requires_grad for parameter in module.parameters())
        for name, arguments in _HOOKS.items():
            if getattr(type(module), name, None) is getattr(pl.LightningModule, name):
                continue
            if not has_averages and name != _BEFORE_ZERO_GRAD:
                continue
            found = self._updates_of(name, arguments(own_copy(batch)))
            if name == _BEFORE_ZERO_GRAD:
                _refuse_trained(found, module)
            if any(found.values()):
                self._names.append(name)
            for target, sources in found.items():
                updates[target] = updates.get(target, frozenset()) | sources
        self.updates: Updates = updates

    def _updates_of(self, name: str, arguments: tuple[Any, ...]) -> Updates:
        call = partial(getattr(self._module, name), *arguments)
        with loggers_muted(self._module.trainer), logging_to(self._module, lambda value: None), output_held():
            return updates_by(name, call, self._module, self._fake_parameters)

    def attached(self, groups: ControlGroups) -> AbstractContextManager[None]:
        """Within, these hooks see every parameter, in the order of one device; those of other stages are fakes.

        What a hook logs when it is called for the first time in a training is compared over the stages, by one gather
        for each hook of a batch.

        Args:
            groups: Join the ranks of the pipeline.
        """
        to_compare = set(_LOG_TRAINING)

        def run(name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if name == _BEFORE_ZERO_GRAD and name in self._names:
                self._postponed.append(partial(run_now, name, hook, *args, **kwargs))
                return None
            return run_now(name, hook, *args, **kwargs)

        def run_now(name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            fake_parameters = self._fake_parameters
            sees_all = name in self._names
            with fake_parameters.all_parameters() if sees_all else nullcontext():
                result = hook(*args, **kwargs)
            if name in to_compare:
                to_compare.remove(name)
                logged = groups.gather_in_pipeline(_logged_by(self._module, name))
                if warning := _difference(name, logged):
                    rank_zero_warn(warning)
            return result

        hooks = {
            name: partial(run, name, getattr(self._module, name))
            for name in _OUTSIDE_STEPS
            if getattr(type(self._module), name) is not getattr(pl.LightningModule, name)
        }
        return replaced(self._module, **hooks)

    def run_postponed(self) -> None:
        """After forward and backward of a batch: runs ``on_before_zero_grad``, if it has to wait for them."""
        while self._postponed:
            self._postponed.pop(0)()


def _refuse_trained(updates: Updates, module: pl.LightningModule) -> None:
    parameters = dict(module.named_parameters())
    if own := [name for name, sources in updates.items() if not sources and parameters[name].requires_grad]:
        raise ConfigurationError(
            f"on_before_zero_grad of {type(module).__name__} writes into parameters that train "
            f"({own[0]!r}{f' and {len(own) - 1} more' if len(own) > 1 else ''}). On one device it does so between "
            "forward and backward, but a pipeline has no moment between the two. Do this in on_train_batch_end."
        )


def _logged_by(module: pl.LightningModule, hook: str) -> dict[str, float | None]:
    """Names and values that the hook has logged by now; None for what is no single number, as an object's."""
    results = results_of(module)
    if results is None:
        return {}
    found: dict[str, float | None] = {}
    for result in results.values():
        if result.meta.fx == hook and not result.meta.sync.rank_zero_only:
            value = result.value if result.is_tensor else None
            found[result.meta.name] = float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else None
    return found


def _difference(hook: str, logged: Sequence[dict[str, float | None]]) -> str | None:
    """What to say if the ranks of a pipeline did not log the same; None if they did."""
    for name in dict.fromkeys(name for one in logged for name in one):
        said = [repr(one[name]) if name in one else "nothing" for one in logged]
        if len(set(said)) > 1:
            values = ", ".join(said[:4]) + (", ..." if len(said) > 4 else "")
            return (
                f"self.log({name!r}, ...) in {hook} is not the same on all stages: {values} on the ranks of the "
                "pipeline. A hook sees the parameters and gradients of its own stage, and loggers get what the first "
                "rank logs. Log it in the step, or with lightning.pytorch.utilities.grad_norm, which is over all "
                "stages. Log values that differ by nature, such as times, with rank_zero_only=True."
            )
    return None
