"""What is wrong with a run that can be known before processes and loggers start."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from omegaconf import DictConfig, OmegaConf

from lightning_pp.split.unit_calls.units import most_units, owns_parameters
from lightning_pp.strategy import PipelineParallelStrategy
from lightning_pp.strategy.plan_only import look_at_cuts


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
    options = strategy.options
    if most_units(model, options.cut.units) >= strategy.fewest_stages:
        return True
    look_at_cuts(
        trainer_options(config), model, data, options, strategy.sizes, lambda cutter: cutter.split(cutter.placement())
    )
    return False


def trainer_options(config: DictConfig) -> dict[str, Any]:
    """The trainer's arguments as plain values; its folder is left out, which is Hydra's to name."""
    kept = {str(name): config[name] for name in config if name not in ("_target_", "default_root_dir")}
    return {
        name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in kept.items()
    }
