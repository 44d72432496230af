"""Cutting a module as training would, in one process, without devices, and stopping there."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch.optim import Optimizer

from lightning_pp.distributed.sizes import Auto
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.memory_limit import DeviceMemory
from lightning_pp.planning.memory_model import MemoryModel
from lightning_pp.planning.recomputed_units import ActivationCheckpointing
from lightning_pp.planning.schedule_options import ScheduleOptions
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.planning.stage_model import RecordedModel, SplitModel, assign_stages, record_model
from lightning_pp.planning.tuning import LayoutRequest, choose_cuts, choose_layout
from lightning_pp.schedule import Placement
from lightning_pp.split.data.microbatch import SplitBatch, batch_size_of
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.fakes.without_memory import parameters_without_memory
from lightning_pp.split.memory.state_memory import StepDtypes
from lightning_pp.strategy.batch.cutter import BatchCutter
from lightning_pp.strategy.parameters.optimizers import set_up_one_optimizer
from lightning_pp.strategy.parameters.precision import step_dtypes
from lightning_pp.strategy.step.data import first_batch
from lightning_pp.strategy.step.dry_steps import first_arguments, recorded_step
from lightning_pp.strategy.step.refusals import refuse_unsupported

_T = TypeVar("_T")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class SplitOptions:
    """What a strategy says about where to cut; see :class:`PipelineParallelStrategy`.

    Attributes:
        num_ranks: Ranks of the pipeline.
        schedule: What is asked of the schedule, with measured costs if there are some.
        num_microbatches: Slices of a batch.
        units: What the user calls units, or None to discover them.
        cut: What the user says of the cuts.
        device_type: Of the device that is planned for.
        activation_checkpointing: What is run again in backward.
        sharding: Inside stages.
        num_shards: Ranks that share the parameters of a stage.
        device_memory_gib: What a rank may hold altogether; None for no limit.
        split_batch: Cuts a batch; None: along dimension 0.
    """

    num_ranks: int
    schedule: ScheduleOptions
    num_microbatches: int | Auto = "auto"
    units: tuple[str, ...] | None = None
    cut: CutOptions = field(default_factory=CutOptions)
    device_type: str = "cpu"
    activation_checkpointing: ActivationCheckpointing = False
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    num_shards: int = 1
    device_memory_gib: float | None = None
    split_batch: SplitBatch | None = None


@dataclass(frozen=True)
class Cut:
    """A cut of a model.

    Attributes:
        split: The stages.
        is_measured: Whether the costs of the units are measured, in milliseconds; FLOPs otherwise.
    """

    split: SplitModel
    is_measured: bool


class ModelCutter:
    """Cuts a module for one placement after another; the module is left as it was.

    Args:
        module: The whole module; its parameters may be on the meta device.
        batch: A batch of one replica.
        options: Where to cut.
        step: The user's step on a microbatch, for a dry run.

    Attributes:
        batch_size: Samples in the batch; None if they cannot be counted.
        num_microbatches: What the batch is cut into.
        microbatch: The first of them, which is what the step is recorded with.
        optimizer: The user's optimizer over the whole module; None where there is none.
        dtypes: Of computation and of gradients, where they are not the parameters'.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        batch: Any,
        options: SplitOptions,
        step: Callable[[Any], Callable[[DryRun], Any]],
        optimizer: Optimizer | None = None,
        dtypes: StepDtypes | None = None,
    ) -> None:
        self.module = module
        self.dtypes = dtypes or StepDtypes()
        self.options = options
        self.optimizer = optimizer
        self.batch_size = batch_size_of(batch)
        cutter = BatchCutter(options.num_microbatches, options.num_ranks, options.split_batch)
        microbatches = cutter.cut(batch, for_training=True)
        self.num_microbatches = len(microbatches)
        self.microbatch = microbatches[0]
        self._step = step(self.microbatch.data)
        self._recordings: list[tuple[int, RecordedModel]] = []

    def split(self, placement: Placement, schedule: ScheduleOptions | None = None) -> Cut:
        """The cut that training makes for ``placement``.

        Args:
            placement: Which rank holds which stages.
            schedule: What is asked of the schedule, if it is not that of the options.

        Raises:
            ConfigurationError, SplitError: As :func:`lightning_pp.split.partition_units` says.
        """
        recording = self._recording(placement.num_stages)
        partition, measured = choose_cuts(
            recording.record, recording.num_parameters, self._request(recording, schedule), placement
        )
        split = assign_stages(recording, placement=placement, partition=partition)
        return Cut(split, measured is not None)

    def placement(self) -> Placement:
        """Where training would put the stages.

        Raises:
            ConfigurationError, SplitError, ScheduleError: As :func:`lightning_pp.planning.tuning.choose_layout` says.
        """
        request = self._request()
        if len(request.placements_to_try) == 1:
            return request.placements_to_try[0]
        recording = self._recording(request.fewest_stages)
        return choose_layout(recording.record, recording.num_parameters, self._request(recording)).placement

    @property
    def memory_model(self) -> MemoryModel:
        """How bytes are counted."""
        model = MemoryModel.of(
            self.options.sharding,
            self.options.num_shards,
            self.dtypes,
            whole_batch_loss=self.options.schedule.whole_batch_loss,
        )
        return model if self.optimizer is None else model.with_optimizer(self.optimizer)

    def _request(
        self, recording: RecordedModel | None = None, schedule: ScheduleOptions | None = None
    ) -> LayoutRequest:
        options = self.options
        request = LayoutRequest(
            schedule or options.schedule,
            options.num_ranks,
            self.num_microbatches,
            options.cut,
            options.device_type,
        )
        if recording is None or options.device_memory_gib is None:
            return request
        return replace(request, memory=DeviceMemory(options.device_memory_gib, self.memory_model, recording, {}))

    def _recording(self, num_stages: int) -> RecordedModel:
        """A recording of the step with the units that training would find for so many stages."""
        for made_for, recording in self._recordings:
            # units are refined until there are enough of them, so that what had enough for fewer stages is the same
            if made_for <= num_stages <= len(recording.record.first_calls()):
                return recording
        recording = record_model(
            self.module,
            device=_CPU,
            step=self._step,
            with_gradients=True,
            patterns=self.options.units,
            num_stages=num_stages,
            compute_dtype=self.dtypes.compute,
            activation_checkpointing=self.options.activation_checkpointing,
        )
        self._recordings.append((num_stages, recording))
        return recording


class _LookedAt(_TunerExitException):
    """Ends a fit before it begins; Lightning lets such an exception end a fit in good order."""


class DryStrategy(SingleDeviceStrategy):
    """Goes through a fit's preparations, as far as a pipeline would cut the module, looks at it, and ends the fit.

    Args:
        options: Where to cut.
        look: Is given the cutter, while the trainer is there.
    """

    def __init__(self, options: SplitOptions, look: Callable[[ModelCutter], Any]) -> None:
        super().__init__(_CPU)
        self._options = options
        self._look = look

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
        batch = first_batch(trainer)
        set_up_one_optimizer(self, trainer)

        def step(microbatch: Any) -> Callable[[DryRun], Any]:
            rest = first_arguments(module, "training_step")
            return recorded_step(
                module, "training_step", microbatch, rest, precision=self.precision_plugin, device=_CPU
            )

        optimizer = self.optimizers[0] if self.optimizers else None
        self._look(ModelCutter(module, batch, self._options, step, optimizer, step_dtypes(self.precision_plugin)))
        raise _LookedAt

    def model_to_device(self) -> None:
        """Nothing: there is no device."""

    def teardown(self) -> None:
        """Nothing: there is nothing on a device."""


def look_at_cuts(
    trainer_options: dict[str, Any],
    module: pl.LightningModule,
    data: Any,
    options: SplitOptions,
    look: Callable[[ModelCutter], _T],
) -> _T:
    """Prepares a fit of ``module`` without memory, devices or processes, and looks at how it can be cut.

    Hooks run as in training: ``prepare_data``, ``setup``, ``configure_model`` (its parameters without memory), the
    training dataloader, ``configure_optimizers``.

    Args:
        trainer_options: Arguments of the trainer; those about devices, loggers and outputs are replaced.
        module: The user's module.
        data: The user's data, a LightningDataModule or a loader; None if the module has its own.
        options: Where to cut.
        look: Is given the cutter, while the trainer is there.

    Returns:
        What ``look`` returned.
    """
    found: list[_T] = []
    replaced = {
        "accelerator": "cpu",
        "devices": 1,
        "num_nodes": 1,
        "logger": False,
        "callbacks": None,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "profiler": None,
        "plugins": None,
        "sync_batchnorm": False,
        "barebones": False,
        "num_sanity_val_steps": 0,
        "strategy": DryStrategy(options, lambda cutter: found.append(look(cutter))),
    }
    with _quiet_lightning():
        trainer = pl.Trainer(**{**trainer_options, **replaced})
        if isinstance(data, pl.LightningDataModule):
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, train_dataloaders=data)
    return found[0]


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Within, Lightning does not tell which devices it found, nor how a loader could be faster."""
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
