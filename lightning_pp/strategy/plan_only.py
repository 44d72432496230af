"""Runs a fit's preparations up to the cut, in one process, without devices, and stops there."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import Optimizer

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.planning.hardware.devices import PLANNED_ON_CPU, PlannedDevice
from lightning_pp.planning.model_cutter import ModelCutter, StepToCut
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.stage_model import RecordedModel
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.fakes.without_memory import parameters_without_memory
from lightning_pp.strategy._lightning_private import EndOfFit
from lightning_pp.strategy.batch.cutter import BatchCutter
from lightning_pp.strategy.batch.whole_batch import first_step
from lightning_pp.strategy.parameters.optimizers import set_up_one_optimizer
from lightning_pp.strategy.parameters.precision import step_dtypes
from lightning_pp.strategy.step.data import first_batch
from lightning_pp.strategy.step.dry_steps import first_arguments
from lightning_pp.strategy.step.refusals import refuse_unsupported

_T = TypeVar("_T")
# of the arguments of a trainer: what needs devices, or writes or prints
_REPLACED: dict[str, Any] = {
    "num_sanity_val_steps": 0,
    **dict.fromkeys(("devices", "num_nodes"), 1),
    **dict.fromkeys(("callbacks", "profiler", "plugins")),
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    **dict.fromkeys(("sync_batchnorm", "barebones"), False),
}


class _LookedAt(EndOfFit):
    """Ends a fit before it begins; Lightning ends a fit in good order after such an exception."""


@dataclass(frozen=True)
class FirstStep:
    """The first training step of a fit, for looks at how a pipeline would run it.

    Attributes:
        module: The whole module.
        batch: The first batch.
        precision: The trainer's.
        optimizer: The user's optimizer over the whole module; None where there is none.
        device: What is planned for.
    """

    module: pl.LightningModule
    batch: Any
    precision: Precision
    optimizer: Optimizer | None
    device: PlannedDevice = PLANNED_ON_CPU

    def cutter(
        self,
        options: PipelineOptions,
        sizes: ParallelSizes,
        microbatches: Sequence[Microbatch] | None = None,
        recordings: Sequence[tuple[int, RecordedModel]] = (),
        *,
        refines: bool = True,
    ) -> ModelCutter:
        """Cuts the module for a step of ``microbatches``, the first of which is looked at.

        Args:
            options: What the user says of the pipeline.
            sizes: Of the pipeline.
            microbatches: Of a batch; None: what training would cut the first batch into.
            recordings: As of :class:`ModelCutter`.
            refines: As of :class:`ModelCutter`.
        """
        if microbatches is None:
            microbatches = BatchCutter(options, sizes.pipeline, self.module).cut(self.batch, for_training=True)
        arguments = first_arguments(self.module, "training_step")
        step = first_step(self.module, "training_step", microbatches[0].data, arguments, self.precision, options)
        return ModelCutter(
            self.module,
            options,
            sizes,
            StepToCut(self.batch, microbatches, step, self.optimizer, step_dtypes(self.precision)),
            self.device,
            recordings=recordings,
            refines=refines,
        )


class DryStrategy(SingleDeviceStrategy):
    """Runs a fit's preparations up to the cut of the module, looks at it, and ends the fit.

    Args:
        look: Is given the first step, while the trainer is there.
        device: What is planned for.
    """

    def __init__(self, look: Callable[[FirstStep], Any], device: PlannedDevice) -> None:
        super().__init__(device.here)
        self._look = look
        self._device = device

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Parameters made within have no memory."""
        with parameters_without_memory(), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """What the strategy of a pipeline does up to the cut."""
        module = self.lightning_module
        assert self.accelerator is not None and module is not None
        self.accelerator.setup(trainer)
        refuse_unsupported(trainer, module, self.precision_plugin, torch.device("cuda"))  # planned for, not run
        self.model = self.precision_plugin.convert_module(module)
        first = first_batch(trainer)
        set_up_one_optimizer(self, trainer)
        optimizer = self.optimizers[0] if self.optimizers else None
        step = FirstStep(module, first.batch, self.precision_plugin, optimizer, self._device)
        with first.as_hooks_left_it():
            self._look(step)
        raise _LookedAt

    def model_to_device(self) -> None:
        """Nothing: there is no device."""

    def teardown(self) -> None:
        """Nothing: there is nothing on a device."""


def look_at_first_step(
    trainer_options: dict[str, Any],
    module: pl.LightningModule,
    data: Any,
    look: Callable[[FirstStep], _T],
    device: PlannedDevice = PLANNED_ON_CPU,
) -> _T:
    """Prepares a fit of ``module`` without memory, devices or processes, and looks at its first step.

    Hooks run as in training: ``prepare_data``, ``setup``, ``configure_model`` (its parameters without memory), the
    training dataloader, ``configure_optimizers``.

    Args:
        trainer_options: Arguments of the trainer; those about devices, loggers and outputs are replaced.
        module: The user's module.
        data: The user's data, a LightningDataModule or a loader; None if the module has its own.
        look: Is given the step, while the trainer is there.
        device: What is planned for.

    Returns:
        What ``look`` returned.
    """
    found: list[_T] = []
    strategy = DryStrategy(lambda step: found.append(look(step)), device)
    with _quiet_lightning():
        replaced = {**_REPLACED, "accelerator": "cpu" if device.here.type == "cpu" else "gpu", "strategy": strategy}
        trainer = pl.Trainer(**{**trainer_options, **replaced})
        if isinstance(data, pl.LightningDataModule):
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, train_dataloaders=data)
    return found[0]


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """In the block, Lightning does not tell which devices it found, nor how a loader could be faster."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
