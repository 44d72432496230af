"""Lightning's ``BaseFinetuning``, whose callbacks freeze parts of the module and add them to the optimizer later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, Timer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_pp.strategy.lightning.callbacks import callbacks_of
from lightning_pp.strategy.lightning.patching import replaced_in_class

_HOOKS = ("on_fit_start", "on_train_epoch_start")


def finetune_whole_module(trainer: pl.Trainer, of_all_parameters: Callable[[], AbstractContextManager[Any]]) -> None:
    """Has the callbacks of ``trainer`` that thaw and add parameters see those of all stages.

    So every rank's optimizer has the groups that one device would have, and knows what trains.

    Args:
        trainer: The trainer, whose fit begins.
        of_all_parameters: Makes a context in which the module has all parameters, with fakes for those of other
            stages; afterwards optimizers have this rank's only.
    """

    @contextmanager
    def within() -> Iterator[None]:
        with of_all_parameters(), replaced_in_class(BaseFinetuning, "filter_on_optimizer", staticmethod(_not_in)):
            yield

    for callback in callbacks_of(trainer):
        if isinstance(callback, BaseFinetuning):
            for name in _HOOKS:
                vars(callback)[name] = within()(MethodType(getattr(type(callback), name), callback))


def resume_callbacks(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Repeats the ``on_fit_start`` of Lightning's callbacks that do there what their restored state asks for.

    ``BaseFinetuning`` adds the groups that it had added when the checkpoint was written, so that its states fit, and a
    ``Timer`` whose time is up stops the training. Where a strategy loads after its set-up, Lightning restores
    callbacks after ``on_fit_start``. ``states`` are those that the checkpoint has.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, (BaseFinetuning, Timer)) and callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
            callback.on_fit_start(trainer, trainer.lightning_module)


def _not_in(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """In place of ``filter_on_optimizer``, which compares the values of all parameters: no stage has them."""
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    params = list(params)
    absent = [parameter for parameter in params if id(parameter) not in present]
    if len(absent) < len(params):
        rank_zero_warn(
            "Parameters to unfreeze are already in the optimizer and stay in their group. Did you init your "
            "optimizer in configure_optimizers with all parameters? Give it only those that require a gradient."
        )
    return absent
