"""The preparation of a pipeline: the step is recorded on every rank, and the model assigned to stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_pp.collector import collector_paused
from lightning_pp.long_tasks import LongTask
from lightning_pp.planning.activation_checkpointing import AUTO
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.refinement.choice import CutChoice
from lightning_pp.planning.refinement.recomputed import about_recomputed, recomputed_units
from lightning_pp.planning.stage_model import (
    RecordedModel,
    RecordingOptions,
    SplitModel,
    assign_stages,
    record_model,
    with_recomputation,
)
from lightning_pp.planning.steps.plans import key_of
from lightning_pp.planning.tuning import Layout, LayoutRequest, compute_on_rank0
from lightning_pp.planning.unit_times.measure import run_each_once
from lightning_pp.split.cut.wide_cuts import ADVICE, WideCut, wide_cuts
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.dry_run.weight_updates import Updates
from lightning_pp.strategy.batch.cutter import BatchCutter
from lightning_pp.strategy.batch.whole_batch import ending_with_batch
from lightning_pp.strategy.connection import Connection
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy
from lightning_pp.strategy.parameters.device_speed import flops_per_byte_of
from lightning_pp.strategy.parameters.precision import step_dtypes
from lightning_pp.strategy.parameters.tensor_units import tensor_parallel_units
from lightning_pp.strategy.step.dry_steps import first_arguments, recorded_step
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
    """

    split: SplitModel
    layout: Layout
    update_hooks: UpdateHooks
    memory: DeviceMemory | None
    cutter: BatchCutter
    num_microbatches: int
    seed: int
    connection: Connection


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
        self._device_memory: DeviceMemory | None = None
        self._recomputed: list[str] = []
        self._update_hooks: UpdateHooks

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
        microbatches = self._cutter.cut(batch, for_training=step == "training_step")
        speed = flops_per_byte_of(self.device, self._precision.precision)
        request = self._options.layout_request(self._given.sizes.pipeline, len(microbatches), self.device.type, speed)
        seed = self._ranks.broadcast(int(torch.initial_seed() % (1 << 40)))
        if self._options.device_memory_gib is not None:
            self._communicators_bytes += self.connection.open_neighbours()
        arguments = first_arguments(self.module, step, has_several_loaders=has_several_loaders)
        with self._in_step_mode(step):
            record = partial(self._record, batch, microbatches, step, arguments, request.fewest_stages)
            recording = self._recorded_by_all(record, step, beforehand)
            if self._options.activation_checkpointing == AUTO and step == "training_step":
                recording = self._recomputing_least(recording, request)
            recording, layout = self._laid_out(recording, request, record)
            split = assign_stages(
                recording, placement=layout.placement, partition=layout.partition, updates=self._updates(step)
            )
            self._start_plans(split, step, microbatches[0], arguments)
            tensor = self._ranks.all_or_none(lambda: tensor_parallel_units(split, self._given, recording.calls))
            if recording.not_on_parts is not None and self._device_memory is not None:
                rank_zero_warn(
                    "device_memory_gib counts whole matrices, since the step cannot be recorded on parts of them: "
                    f"{recording.not_on_parts}"
                )
            if self.device.type in LOADING_DEVICES and step == "training_step":
                with (
                    LongTask("The first run of each distinct unit", rank_zero_info),
                    self._cutter.noted(batch, len(microbatches)),
                ):
                    recorded = self._recorded_step(step, microbatches[0], arguments)
                    run_each_once(recording, split.units_of(self._given.rank), recorded, self.device)
        for text in filter(None, dict.fromkeys((recording.about_head, layout.about_head))):
            rank_zero_info(text)
        if split.record.failure is None:
            _warn_wide_cuts(wide_cuts(split.step_plan()))
        self.connection.set_last_stage(layout.placement.rank_of_stage[-1])
        return LaidOutModel(
            replace(split, tensor=tensor), layout, self._update_hooks, self._device_memory, self._cutter,
            len(microbatches), seed, self.connection,
        )  # fmt: skip

    def _recorded_by_all(
        self, record: Callable[[], RecordedModel], step: str, beforehand: AbstractContextManager[Optimizer | None]
    ) -> RecordedModel:
        """What ``record`` returns, once it is known that it did the same on every rank; otherwise every rank raises."""

        def look() -> RecordedModel:
            with beforehand as optimizer, LongTask(f"The dry run of {step}", rank_zero_info):
                recording = record()
                self._device_memory = self._limit_of_memory(recording, step, optimizer)
                del optimizer
            return recording

        recording: RecordedModel = self._ranks.all_or_none(look)
        failure = recording.record.failure
        if self._ranks.reduce_boolean_decision(failure is not None):
            refuse_unrecorded(step, failure, self._options)
        else:
            self._ranks.all_or_none(lambda: raise_own(failure))
        return recording

    def _recomputing_least(self, recording: RecordedModel, request: LayoutRequest) -> RecordedModel:
        """``recording`` with as few recomputed blocks as the memory limit allows."""
        assert self._device_memory is not None
        memory = self._device_memory
        self._recomputed = self._decided(
            partial(recomputed_units, recording, lambda one: replace(request, memory=memory.of(one)))
        )
        rank_zero_info(about_recomputed(self._recomputed, recording, memory.limit_gib))
        return with_recomputation(recording, self._recomputed)

    def _decided(self, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns on rank 0, on every rank."""
        decides = self._given.mesh.get_rank() == 0
        return compute_on_rank0(compute, decides=decides, broadcast=self._ranks.broadcast)

    def _laid_out(
        self, recording: RecordedModel, request: LayoutRequest, record: Callable[..., RecordedModel]
    ) -> tuple[RecordedModel, Layout]:
        """The recording that is laid out, perhaps with blocks refined that a cut falls in, and how."""

        def request_of(recording: RecordedModel) -> LayoutRequest:
            memory = self._device_memory
            return replace(request, memory=None if memory is None else memory.of(recording))

        def again(names: Collection[str], num_head_parts: int) -> RecordedModel | None:
            try:
                found: RecordedModel = self._ranks.all_or_none(partial(record, names, num_head_parts))
            except Exception:  # of the user's code, too, which is not run so then; on every rank, if on one
                return None
            hooks[id(found.fake_parameters)] = self._update_hooks
            return found

        hooks = {id(recording.fake_parameters): self._update_hooks}
        with LongTask("The choice of cuts and schedule", rank_zero_info):
            chosen, layout = CutChoice(recording, request_of, again, self._decided).layout()
        self._update_hooks = hooks[id(chosen.fake_parameters)]
        self._device_memory = request_of(chosen).memory
        if chosen.refinement is not None:
            rank_zero_info(str(chosen.refinement))
        return chosen, layout

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

    def _record(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        step: str,
        arguments: Sequence[Any],
        num_stages: int,
        refined: Collection[str] = (),
        num_head_parts: int | None = None,
    ) -> RecordedModel:
        """A dry run of ``step`` on the first microbatch, with units for ``num_stages``; ``refined`` in parts."""
        trains = step == "training_step"
        split_head = self._options.split_head if num_head_parts is None else num_head_parts or False
        size = self._given.sizes.tensor
        recorded = self._recorded_step(step, microbatches[0], arguments)
        with self._cutter.noted(batch, len(microbatches)):
            recording = record_model(
                self.module,
                device=self.device,
                step=recorded,
                with_gradients=trains,
                patterns=self._options.cut.units,
                num_stages=num_stages,
                how=RecordingOptions(
                    step_dtypes(self._precision).compute,
                    self._options.recorded_checkpointing,
                    may_fail=True,
                    split_head=split_head if trains else False,
                    refined={*refined, *self._options.refined_units(self.module)},
                    tensor=None if size == 1 else self._options.tensor_ranks(size),
                ),
            )
        if self._recomputed:
            recording = with_recomputation(recording, self._recomputed)
        refuse_carried_state(self.module, step, recording.record, len(microbatches))
        self._update_hooks = UpdateHooks(self.module, recording.fake_parameters, batch)
        return recording

    def _recorded_step(self, step: str, microbatch: Microbatch, arguments: Sequence[Any]) -> Callable[[Any], Any]:
        precision, trains = self._precision, step == "training_step"
        recorded = recorded_step(self.module, step, microbatch.data, arguments, precision=precision, trains=trains)
        ends_with_batch = self._options.schedule.whole_batch_loss and step != "predict_step"
        return ending_with_batch(recorded) if ends_with_batch else recorded

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

    def _updates(self, step: str) -> Updates:
        """What hooks write into parameters, in training."""
        return self._update_hooks.updates if step == "training_step" else {}

    def _limit_of_memory(self, recording: RecordedModel, step: str, optimizer: Optimizer | None) -> DeviceMemory | None:
        """The memory limit of a rank, and how memory is counted; None for no limit."""
        if self._options.device_memory_gib is None:
            return None
        model = MemoryModel.of(
            self._options.sharding,
            self._given.sizes.data_parallel_shard,
            step_dtypes(self._precision),
            trains=step == "training_step",
            options=self._options.schedule,
            device_type=self.device.type,
            optimizer=optimizer,
        )
        limit_gib, updates = self._options.device_memory_gib, self._updates(step)
        return DeviceMemory(limit_gib, model, recording, updates, self._communicators_bytes)


def _warn_wide_cuts(cuts: Sequence[WideCut]) -> None:
    widest = max(cuts, key=lambda cut: cut.crossing_bytes, default=None)
    if widest is not None and widest.crossing_bytes >= 1 << 20:  # less is sent in no time
        others = f" Further cuts that send much: {len(cuts) - 1}." if len(cuts) > 1 else ""
        rank_zero_warn(f"Stages exchange much data: {widest}.{others} {ADVICE}")
