"""Hooks of the module that write into parameters, as the update of a momentum encoder does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim.swa_utils import AveragedModel

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.errors import ConfigurationError
from lightning_pp.split.data.tree import own_copy
from lightning_pp.split.dry_run.weight_updates import Updates, updates_by
from lightning_pp.split.fakes.fake_mode import LostEditError, NeedsDataError
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.strategy._lightning_private import results_of
from lightning_pp.strategy.lightning.callbacks import callbacks_of
from lightning_pp.strategy.lightning.callers import is_of_lightning
from lightning_pp.strategy.lightning.patching import replaced
from lightning_pp.strategy.step.dry_steps import loggers_muted, logging_to
from lightning_pp.strategy.step.held_output import output_held

_BEFORE_ZERO_GRAD, _ZERO_GRAD = "on_before_zero_grad", "optimizer_zero_grad"
_HOOKS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "on_train_epoch_start": lambda batch: (),
    "on_train_batch_start": lambda batch: (batch, 0),
    _BEFORE_ZERO_GRAD: lambda batch: (None,),
    _ZERO_GRAD: lambda batch: (0, 0, _optimizer_of_nothing()),
    "on_before_backward": lambda batch: (torch.zeros(()),),
    "on_after_backward": lambda batch: (),
    "on_before_optimizer_step": lambda batch: (None,),
    "configure_gradient_clipping": lambda batch: (_optimizer_of_nothing(), None, None),
    "optimizer_step": lambda batch: (0, 0, _optimizer_of_nothing(), lambda: None),
    "lr_scheduler_step": lambda batch: (SimpleNamespace(step=lambda *args: None), None),
    "on_train_batch_end": lambda batch: ({"loss": torch.zeros(())}, batch, 0),
    "on_train_epoch_end": lambda batch: (),
}

_LOG_TRAINING = tuple(name for name in _HOOKS if name.startswith("on_") and "epoch" not in name)
_OUTSIDE_STEPS = (
    *("on_fit_start", "on_train_start", *_HOOKS),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_train_end"),
)


class UpdateHooks:
    """The hooks that write into parameters, found by running them on fakes.

    Only modules with parameters that do not train are looked at: an average of weights has no gradient. But
    ``on_before_zero_grad`` is always looked at: on one device it runs between forward and backward. A pipeline has no
    such moment, so it runs before both, and after both where it writes into parameters.

    A hook that wants what is there only while training runs is known as far as it comes. Where a part of the module is
    frozen and like one that trains, it sees every parameter all the same, and so do callbacks without a state: pairs of
    parameters are those of one device, and what is computed over stages is an error.

    Args:
        module: The user's module.
        fake_parameters: Knows all its parameters.
        batch: A batch to call hooks with.
    """

    def __init__(self, module: pl.LightningModule, fake_parameters: FakeParameters, batch: Any) -> None:
        self._module = module
        self._fake_parameters = fake_parameters
        self._names: list[str] = []
        self._postpones = False
        self._postponed: list[Callable[[], Any]] = []
        frozen, trained = (set(_copied(module, requires_grad=value)) for value in (False, True))
        self._has_copy = not frozen.isdisjoint(trained)
        updates: dict[str, frozenset[str]] = {}
        # all parameters of an AveragedModel require gradients
        has_averages = any(isinstance(child, AveragedModel) for child in module.modules())
        has_averages = has_averages or not all(parameter.requires_grad for parameter in module.parameters())
        for name, arguments in _HOOKS.items():
            if getattr(type(module), name, None) is getattr(pl.LightningModule, name):
                continue
            if not has_averages and name != _BEFORE_ZERO_GRAD:
                continue
            found, failure = self._updates_of(name, arguments(own_copy(batch)))
            if name == _ZERO_GRAD:
                _refuse_averages(found, module)
            elif name == _BEFORE_ZERO_GRAD:
                _refuse_trained(found, module)
                self._postpones = any(found.values())
            is_unknown = self._has_copy and not isinstance(failure, (type(None), NeedsDataError))
            if any(found.values()) or is_unknown:
                self._names.append(name)
            for target, sources in found.items():
                updates[target] = updates.get(target, frozenset()) | sources
        self.updates: Updates = updates

    def _updates_of(self, name: str, arguments: tuple[Any, ...]) -> tuple[Updates, Exception | None]:
        call = partial(getattr(self._module, name), *arguments)
        with loggers_muted(self._module.trainer), logging_to(self._module, lambda value: None), output_held():
            return updates_by(call, self._module, self._fake_parameters)

    def attached(self, groups: ControlGroups) -> AbstractContextManager[Any]:
        """In the block, these hooks see every parameter, in the order of one device; those of other stages are fakes.

        What a hook logs when it is called for the first time in a training is compared over the stages, by one gather
        for each hook of a batch.

        Args:
            groups: Join the ranks of the pipeline.
        """
        to_compare = set(_LOG_TRAINING)

        def run(name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if name == _BEFORE_ZERO_GRAD and self._postpones:
                self._postponed.append(partial(run_now, name, hook, *args, **kwargs))
                return None
            return run_now(name, hook, *args, **kwargs)

        def run_now(name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = (partial(self._seeing_all, hook) if name in self._names else hook)(*args, **kwargs)
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
        attached = ExitStack()
        attached.enter_context(replaced(self._module, **hooks))
        for callback in callbacks_of(self._module.trainer) if self._has_copy else ():
            if type(callback).state_dict is not pl.Callback.state_dict:  # it keeps values, for which fakes are no use
                continue
            own = [name for name in _LOG_TRAINING if not is_of_lightning(getattr(type(callback), name))]
            seeing = {name: partial(self._seeing_all, getattr(callback, name)) for name in own}
            attached.enter_context(replaced(callback, **seeing))
        return attached

    def _seeing_all(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call_within(self._fake_parameters.all_parameters, hook, *args, **kwargs)
        for parameter in self._module.parameters():
            if parameter.is_meta:  # by ``parameter.data = ...``
                raise LostEditError("Tensor.data", parameter, getattr(hook, "__qualname__", repr(hook)))
        return result

    def run_postponed(self) -> None:
        """After forward and backward of a batch: runs ``on_before_zero_grad``, if it has to wait for them."""
        while self._postponed:
            self._postponed.pop(0)()


def call_within(
    context: Callable[[], AbstractContextManager[Any]], hook: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls ``hook`` within ``context()``, but for the closure that ``optimizer_step`` gets: it runs the pipeline."""
    with ExitStack() as stack:
        stack.enter_context(context())

        def outside(closure: Closure) -> Any:
            stack.close()
            try:
                return closure()
            finally:
                stack.enter_context(context())

        args = tuple(partial(outside, value) if isinstance(value, Closure) else value for value in args)
        return hook(*args, **kwargs)


def _optimizer_of_nothing() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)])


def _copied(module: torch.nn.Module, *, requires_grad: bool) -> Iterator[tuple[torch.Size, ...]]:
    """The shapes of the parameters of each submodule with either all or no parameters training."""
    for child in module.modules():
        held = list(child.parameters())
        if held and all(parameter.requires_grad is requires_grad for parameter in held):
            yield tuple(parameter.shape for parameter in held)


def _refuse_trained(updates: Updates, module: pl.LightningModule) -> None:
    parameters = dict(module.named_parameters())
    if own := [name for name, sources in updates.items() if not sources and parameters[name].requires_grad]:
        raise ConfigurationError(
            f"on_before_zero_grad of {type(module).__name__} writes into parameters that train "
            f"({own[0]!r}{f' and {len(own) - 1} more' if len(own) > 1 else ''}). On one device it does so between "
            "forward and backward, but a pipeline has no moment between the two. Do this in on_train_batch_end."
        )


def _refuse_averages(updates: Updates, module: pl.LightningModule) -> None:
    if updates:
        raise ConfigurationError(
            f"optimizer_zero_grad of {type(module).__name__} writes into parameters ({next(iter(updates))!r}). On one "
            "device it does so between forward and backward, but a pipeline has no moment between the two. Do this in "
            "on_train_batch_end."
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
