"""Hooks of the module that see parameters: those that write into them, as the update of a momentum encoder does."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_pp.split.placeholders import Placeholders
from lightning_pp.split.weight_updates import Updates, updates_by
from lightning_pp.strategy.dry_steps import logging_to
from lightning_pp.strategy.patching import replaced

_HOOKS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "on_train_batch_start": lambda batch: (batch, 0),
    "on_before_zero_grad": lambda batch: (None,),
    "on_after_backward": lambda batch: (),
    "on_train_batch_end": lambda batch: ({"loss": torch.zeros(())}, batch, 0),
}

_OUTSIDE_STEPS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    *_HOOKS,
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_train_end",
)


class UpdateHooks:
    """The hooks that write into parameters, found by running them on fakes.

    Only modules with parameters that do not train are looked at: an average of weights has no gradient.

    Args:
        module: The user's module.
        placeholders: Knows all its parameters.
        batch: A batch to call hooks with.
    """

    def __init__(self, module: pl.LightningModule, placeholders: Placeholders, batch: Any) -> None:
        self._module = module
        self._placeholders = placeholders
        self._names: list[str] = []
        updates: dict[str, frozenset[str]] = {}
        for name, arguments in _HOOKS.items():
            if getattr(type(module), name, None) is getattr(pl.LightningModule, name):
                continue
            if all(parameter.requires_grad for parameter in module.parameters()):
                continue
            found = self._updates_of(name, arguments(batch))
            if any(found.values()):
                self._names.append(name)
            for target, sources in found.items():
                updates[target] = updates.get(target, frozenset()) | sources
        self.updates: Updates = updates

    def _updates_of(self, name: str, arguments: tuple[Any, ...]) -> Updates:
        trainer = self._module.trainer
        loggers, trainer.loggers = trainer.loggers, [DummyLogger()]
        with logging_to(self._module, lambda value: None), redirect_stdout(io.StringIO()):
            try:
                return updates_by(lambda: getattr(self._module, name)(*arguments), self._module, self._placeholders)
            finally:
                trainer.loggers = loggers

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within, these hooks see every parameter, in the order of one device; those of other stages are fakes.

        No hook may write a fake into a tensor that has data.
        """

        def run(hook: Callable[..., Any], sees_all: bool, *args: Any, **kwargs: Any) -> Any:
            placeholders = self._placeholders
            with placeholders.mode.refusing_edits(), placeholders.all_parameters() if sees_all else nullcontext():
                return hook(*args, **kwargs)

        hooks = {
            name: partial(run, getattr(self._module, name), name in self._names)
            for name in _OUTSIDE_STEPS
            if getattr(type(self._module), name) is not getattr(pl.LightningModule, name)
        }
        with replaced(self._module, **hooks):
            yield
