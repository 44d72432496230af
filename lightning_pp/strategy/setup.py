"""The preparation of a pipeline: the step is recorded on every rank, and the model assigned to stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_pp.collector import collector_paused
from lightning_pp.long_tasks import LongTask
from lightning_pp.planning.hardware.devices import PlannedDevice
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.model_cutter import ModelCutter, StepToCut, TrainingRanks
from lightning_pp.planning.refinement.choice import Decided
from lightning_pp.planning.stage_model import RecordedModel, SplitModel, assign_stages
from lightning_pp.planning.steps.plans import key_of
from lightning_pp.planning.tuning import Layout
from lightning_pp.planning.unit_times.measure import run_each_once
from lightning_pp.split.cut.wide_cuts import ADVICE, WideCut, wide_cuts
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.strategy.batch.cutter import BatchCutter
from lightning_pp.strategy.batch.whole_batch import first_step
from lightning_pp.strategy.connection import Connection
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy
from lightning_pp.strategy.parameters.device_speed import flops_per_byte_of
from lightning_pp.strategy.parameters.precision import step_dtypes
from lightning_pp.strategy.parameters.tensor_units import tensor_parallel_units
from lightning_pp.strategy.step.dry_steps import first_arguments
from lightning_pp.strategy.step.refusals import raise_own, refuse_carried_state, refuse_unrecorded
from lightning_pp.strategy.step.update_hooks import UpdateHooks
from lightning_pp.strategy.surroundings import Surroundings

LOADING_DEVICES = {"cuda"}
"""Devices that load kernels when they are first used, and wait for all of their work then."""


@dataclass(frozen=True)
class LaidOutModel:
    """A model assigned to stages, still whole on every rank.

    Attributes:
        split: Its stages.
        layout: Why they are so, and the first schedule.
        update_hooks: The user's hooks that write into parameters.
        memory: What a rank may hold altogether; None for no limit.
        cutter: Cuts batches.
        num_microbatches: Of the first batch.
        seed: Of this run's random numbers, the same on every rank.
        connection: Joins the ranks; it knows the last stage.
        compute_on_rank0: Returns on every rank what its argument returns on rank 0.
    """

    split: SplitModel
    layout: Layout
    update_hooks: UpdateHooks
    memory: DeviceMemory | None
    cutter: BatchCutter
    num_microbatches: int
    seed: int
    connection: Connection
    compute_on_rank0: Decided


class PipelineSetup:
    """Records the user's step and assigns the model to stages; every rank must make it.

    Args:
        surroundings: Where the pipeline is to run.
        ranks: The strategy, by which all ranks decide together.

    Attributes:
        connection: Joins the ranks.
    """

    def __init__(self, surroundings: Surroundings, ranks: MeshStrategy) -> None:
        self.connection = Connection(surroundings.mesh, surroundings.sizes, surroundings.device, surroundings.timeout)
        self._given = surroundings
        self._ranks = ranks
        self._options = surroundings.options
        self.module = surroundings.module
        self.device = surroundings.device
        self._precision = surroundings.precision
        self._cutter = BatchCutter(self._options, surroundings.sizes.pipeline, self.module)
        self._communicators_bytes = surroundings.communicators_bytes
        self._hooks: dict[FakeParameters, UpdateHooks] = {}

    @collector_paused()
    def lay_out(
        self,
        batch: Any,
        step: str,
        beforehand: AbstractContextManager[Optimizer | None],
        *,
        has_several_loaders: bool = False,
    ) -> LaidOutModel:
        """Assigns the module to stages by a dry run of ``step`` on ``batch``.

        Args:
            batch: A whole batch on the device.
            step: Name of the module's step.
            beforehand: Around the dry run; yields the user's optimizer over the whole module, to ask it for what it
                keeps of a parameter. It must not outlive the context, for it holds all parameters.
            has_several_loaders: Whether the step gets the number of the loader that a batch is from.
        """
        trains = step == "training_step"
        microbatches = self._cutter.cut(batch, for_training=trains)
        seed = self._ranks.broadcast(int(torch.initial_seed() % (1 << 40)))
        if self._options.device_memory_gib is not None:
            self._communicators_bytes += self.connection.open_neighbours()
        arguments = first_arguments(self.module, step, has_several_loaders=has_several_loaders)
        run = first_step(self.module, step, microbatches[0].data, arguments, self._precision, self._options)
        with self._in_step_mode(step):
            cutter, recording = self._recorded_by_all(batch, microbatches, step, run, beforehand)
            with LongTask("The choice of cuts and schedule", rank_zero_info):
                recording, layout = cutter.layout(recording)
            if recording.refinement is not None:
                rank_zero_info(str(recording.refinement))
            hooks, memory = self._hooks[recording.fake_parameters], cutter.memory(recording)
            updates = hooks.updates if trains else {}
            split = assign_stages(recording, placement=layout.placement, partition=layout.partition, updates=updates)
            self._start_plans(split, step, microbatches[0], arguments)
            tensor = self._ranks.all_or_none(lambda: tensor_parallel_units(split, self._given, recording.calls))
            if recording.not_on_parts is not None and memory is not None:
                rank_zero_warn(
                    "device_memory_gib counts whole matrices, since the step cannot be recorded on parts of them: "
                    f"{recording.not_on_parts}"
                )
            if self.device.type in LOADING_DEVICES and trains:
                with (
                    LongTask("The first run of each distinct unit", rank_zero_info),
                    self._cutter.noted(batch, len(microbatches)),
                ):
                    run_each_once(recording, split.units_of(self._given.rank), run, self.device)
        for text in filter(None, dict.fromkeys((recording.about_head, layout.about_head))):
            rank_zero_info(text)
        if split.record.failure is None:
            _warn_wide_cuts(wide_cuts(split.step_plan()))
        self.connection.set_last_stage(layout.placement.rank_of_stage[-1])
        return LaidOutModel(
            replace(split, tensor=tensor), layout, hooks, memory, self._cutter, len(microbatches), seed,
            self.connection, self._ranks.compute_on_rank0,
        )  # fmt: skip

    def _recorded_by_all(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        step: str,
        run: Callable[[DryRun], Any],
        beforehand: AbstractContextManager[Optimizer | None],
    ) -> tuple[ModelCutter, RecordedModel]:
        """The recorded step, once it is known that it did the same on every rank, and what cuts it; else all raise."""
        all_or_none, trains = self._ranks.all_or_none, step == "training_step"

        def checked(recording: RecordedModel) -> RecordedModel:
            refuse_carried_state(self.module, step, recording.record, len(microbatches))
            self._hooks[recording.fake_parameters] = UpdateHooks(self.module, recording.fake_parameters, batch)
            return recording

        def look() -> RecordedModel:
            with beforehand as optimizer, LongTask(f"The dry run of {step}", rank_zero_info):
                with self._cutter.noted(batch, len(microbatches)):
                    recording = cutter.record(num_stages)
                hooks = self._hooks[checked(recording).fake_parameters]
                cutter.count(optimizer, hooks.updates if trains else {}, self._communicators_bytes)
                del optimizer
            return recording

        ranks = TrainingRanks(self._ranks.compute_on_rank0, lambda record: all_or_none(lambda: checked(record())))
        cutter = ModelCutter(
            self.module,
            self._options,
            self._given.sizes,
            StepToCut(batch, microbatches, run, None, step_dtypes(self._precision), trains, ranks=ranks),
            PlannedDevice(self.device.type, flops_per_byte_of(self.device, self._precision.precision), self.device),
        )
        num_stages = cutter.fewest_stages
        recording = all_or_none(look)
        failure = recording.record.failure
        if self._ranks.reduce_boolean_decision(failure is not None):
            refuse_unrecorded(step, failure, self._options)
        else:
            all_or_none(lambda: raise_own(failure))
        recording = cutter.keep(num_stages, recording)
        if cutter.about_recomputed:
            rank_zero_info(cutter.about_recomputed)
        return cutter, recording

    @contextmanager
    def _in_step_mode(self, step: str) -> Iterator[None]:
        """In the block, all modules are in the mode that ``step`` runs in."""
        modes = [(child, child.training) for child in self.module.modules()]
        if step != "training_step":
            self.module.eval()
        try:
            yield
        finally:
            for child, mode in modes:
                child.training = mode

    def _start_plans(self, split: SplitModel, step: str, microbatch: Microbatch, arguments: Sequence[Any]) -> None:
        """Has the dry run serve the first step like it, where that runs the same code on the same units."""
        if (
            split.record.failure is None
            and self._given.sizes.tensor == 1
            and not self._options.schedule.whole_batch_loss
        ):
            trains, names = step == "training_step", split.fake_parameters.canonical_names
            frozen = {names[name] for name, each in self.module.named_parameters() if trains and not each.requires_grad}
            key = key_of(step, arguments[1:], microbatch.data, frozen)
            split.plans.start_with(key, split.record, with_gradients=trains)


def _warn_wide_cuts(cuts: Sequence[WideCut]) -> None:
    widest = max(cuts, key=lambda cut: cut.crossing_bytes, default=None)
    if widest is not None and widest.crossing_bytes >= 1 << 20:  # less is sent in no time
        others = f" Further cuts that send much: {len(cuts) - 1}." if len(cuts) > 1 else ""
        rank_zero_warn(f"Stages exchange much data: {widest}.{others} {ADVICE}")
