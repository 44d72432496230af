"""Checks of a run before processes and loggers start: mistakes, and checkpoints that would never be saved."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from lightning_pp.split.unit_calls.units import most_units, owns_parameters
from lightning_pp.strategy import PipelineParallelStrategy
from lightning_pp.strategy.plan_only import FirstStep, look_at_first_step


def can_be_cut(trainer: L.Trainer, model: L.LightningModule, data: Any, config: DictConfig) -> bool:
    """Whether the model's modules are enough for the stages of the pipeline, or there is no pipeline.

    Counting them takes no time. Only where they seem too few the step is recorded, in this process, which tells.

    Args:
        trainer: Of the run.
        model: The whole model. One that makes its modules in ``configure_model`` is not counted.
        data: Of the run.
        config: That of the trainer.

    Returns:
        False if it took a recording to find that they are enough; ``model`` and ``data`` have been used for it then.

    Raises:
        ConfigurationError, SplitError: The model cannot be cut into so many stages.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, PipelineParallelStrategy) or strategy.is_plain or not owns_parameters(model):
        return True
    options, sizes = strategy.options, strategy.sizes
    if most_units(model, options.cut.units) >= strategy.fewest_stages:
        return True

    def cut(step: FirstStep) -> None:
        cutter = step.cutter(options, sizes)
        cutter.split(cutter.placement())

    look_at_first_step(trainer_options(config), model, data, cut)
    return False


def callbacks_that_save(
    callbacks: DictConfig, model: L.LightningModule, data: L.LightningDataModule | None, trainer: DictConfig
) -> dict[str, Any]:
    """The callbacks of a fit; without validations those that save after them save after each training epoch instead.

    Lightning does so itself only where ``check_val_every_n_epoch`` is 1. Recipes count validations in steps, for which
    it has to be null, and a model without a validation would leave no checkpoint.

    Args:
        callbacks: Configs by name.
        model: Of the run.
        data: Of the run; None where the model has its loaders.
        trainer: Config of the trainer.
    """
    owners = [owner for owner in (model, data) if owner is not None]
    validates = is_overridden("validation_step", model) and any(is_overridden("val_dataloader", o) for o in owners)
    given = {str(name): callbacks[name] for name in callbacks if callbacks[name] is not None}
    if validates and trainer.get("limit_val_batches") != 0:
        return given
    for name, one in given.items():
        if not isinstance(one, DictConfig):  # which is told where it is built
            continue
        if "save_on_train_epoch_end" in one and one.save_on_train_epoch_end is None and not one.every_n_train_steps:
            given[name] = OmegaConf.merge(one, {"save_on_train_epoch_end": True})
    return given


def trainer_options(config: DictConfig) -> dict[str, Any]:
    """The trainer's arguments as plain values; its folder is left out, which is Hydra's to name."""
    kept = {str(name): config[name] for name in config if name not in ("_target_", "default_root_dir")}
    return {
        name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in kept.items()
    }
