"""A model cut as training would cut it, for one placement after another, without devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.errors import SplitError
from lightning_pp.planning.activation_checkpointing import AUTO
from lightning_pp.planning.hardware.devices import PLANNED_ON_CPU, PlannedDevice
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.refinement.choice import CutChoice
from lightning_pp.planning.refinement.recomputed import recomputed_units
from lightning_pp.planning.schedules.source import ScheduleSource
from lightning_pp.planning.stage_model import (
    RecordedModel,
    RecordingOptions,
    SplitModel,
    assign_stages,
    on_tensor_ranks,
    record_model,
    with_recomputation,
)
from lightning_pp.planning.tuning import LayoutRequest
from lightning_pp.planning.unit_times.measure import UnitTimes
from lightning_pp.schedule import Placement
from lightning_pp.split.data.microbatch import Microbatch, batch_size_of
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.head.choice import SplitHead, head_to_split
from lightning_pp.split.memory.state_memory import StepDtypes


@dataclass(frozen=True)
class Cut:
    """A cut of a model.

    Attributes:
        split: The stages.
        is_measured: Whether the costs of the units are measured, in milliseconds; FLOPs otherwise.
        about_head: What cutting the head would do, a sentence; empty if it was not considered.
    """

    split: SplitModel
    is_measured: bool
    about_head: str = ""


@dataclass(frozen=True)
class StepToCut:
    """The step for which a model is cut.

    Attributes:
        batch: A batch of one replica.
        microbatches: What it is cut into.
        step: The user's step on the first microbatch, for a dry run.
        optimizer: The user's optimizer over the whole module; None where there is none.
        dtypes: Of computation and of gradients, where they are not the parameters'.
    """

    batch: Any
    microbatches: Sequence[Microbatch]
    step: Callable[[DryRun], Any]
    optimizer: Optimizer | None = None
    dtypes: StepDtypes = field(default_factory=StepDtypes)


class ModelCutter:
    """Cuts a module for one placement after another; the module is left as it was.

    Args:
        module: The whole module; its parameters may be on the meta device.
        options: What the user says of the pipeline.
        sizes: Of the pipeline.
        step: A step of training.
        device: What is planned for.
        recordings: Recordings of the step that there are, each with the number of stages that its units were found
            for; others are made when they are needed.
        refines: Whether cuts may fall inside of blocks, as in training; that takes more recordings for each placement.

    Attributes:
        batch_size: Samples in the batch; None if they cannot be counted.
        microbatch: The first microbatch, which is what the step is recorded with.
        num_microbatches: How many there are.
        optimizer: The user's, over the whole module; None where there is none.
    """

    def __init__(
        self,
        module: nn.Module,
        options: PipelineOptions,
        sizes: ParallelSizes,
        step: StepToCut,
        device: PlannedDevice = PLANNED_ON_CPU,
        *,
        recordings: Sequence[tuple[int, RecordedModel]] = (),
        refines: bool = True,
    ) -> None:
        self.module = module
        self.options = options
        self.sizes = sizes
        self.batch_size = batch_size_of(step.batch, options.batches.batch_dim)
        self.microbatch = step.microbatches[0]
        self.num_microbatches = len(step.microbatches)
        self._step, self.optimizer = step, step.optimizer
        self._device = device
        self._recordings = list(recordings)
        self._refines = refines
        self._refined: dict[tuple[int, frozenset[str], int], RecordedModel | None] = {}
        self._unit_times: UnitTimes | None = None
        self._recomputed: list[str] = []

    def measure_units(self, most_seconds: float, tell: Callable[[str], None] = lambda text: None) -> UnitTimes:
        """From here on, cuts and costs use the times of units that run alone on the device.

        Args:
            most_seconds: How long all units may take together; each distinct one runs once in any case.
            tell: Called with the one that is being measured.

        Returns:
            What measures them; it has those of a model once that has been cut.
        """
        self._unit_times = UnitTimes(self._step.step, self._device.here, most_seconds, tell)
        return self._unit_times

    def split(self, placement: Placement, source: ScheduleSource | None = None) -> Cut:
        """The cut that training makes for ``placement``.

        Args:
            placement: Which rank holds which stages.
            source: Where programs come from, if it is not what the options say.

        Raises:
            ConfigurationError, SplitError: As :func:`lightning_pp.split.partition_units` says.
        """
        asked = self._request(source=source)
        recording = self.recording(asked.fewest_stages if placement in asked.placements else placement.num_stages)
        cut, chosen = self._choice(recording, source).cuts(placement)
        split = assign_stages(cut, placement=placement, partition=chosen.partition)
        return Cut(split, chosen.costs is not None, chosen.about_head)

    def _choice(self, recording: RecordedModel, source: ScheduleSource | None = None) -> CutChoice:
        num_stages = next(made_for for made_for, one in self._recordings if one is recording)
        again = partial(self._with_refined, num_stages) if self._refines else None
        return CutChoice(recording, lambda recording: self._request(recording, source), again)

    def placement(self) -> Placement:
        """Where training would put the stages.

        Raises:
            ConfigurationError, SplitError, ScheduleError: As :func:`lightning_pp.planning.tuning.best_layout` says.
        """
        request = self._request()
        if len(request.placements) == 1:
            return request.placements[0]
        return self._choice(self.recording(request.fewest_stages)).layout()[1].placement

    @property
    def memory_model(self) -> MemoryModel:
        """How bytes are counted."""
        return MemoryModel.of(
            self.options.sharding,
            self.sizes.data_parallel_shard,
            self._step.dtypes,
            options=self.options.schedule,
            device_type=self._device.type,
            optimizer=self.optimizer,
        )

    def _request(self, recording: RecordedModel | None = None, source: ScheduleSource | None = None) -> LayoutRequest:
        request = self.options.layout_request(
            self.sizes.pipeline, self.num_microbatches, self._device.type, self._device.flops_per_byte
        )
        if source is not None:
            request = replace(request, options=replace(request.options, source=source))
        if recording is not None and self._unit_times is not None:
            costs = self._unit_times.of(recording)
            request = replace(request, options=replace(request.options, costs=costs))
        if recording is None or self.options.device_memory_gib is None:
            return request
        memory = DeviceMemory(self.options.device_memory_gib, self.memory_model, recording, {})
        return replace(request, memory=memory)

    def recording(self, num_stages: int, like: RecordedModel | None = None) -> RecordedModel:
        """A recording of the step with the units that training would find for so many stages.

        Args:
            num_stages: Of the pipeline.
            like: One for so many stages of the step on a batch of another size, by which it is made sooner.
        """
        for made_for, recording in self._recordings:
            # units are refined until there are enough of them, so that what had enough for fewer stages is the same
            if made_for <= num_stages <= len(recording.record.first_calls()) and self._is_head_for(
                recording, made_for, num_stages
            ):
                return recording
        recording = self._record(num_stages, like=like)
        if self.options.activation_checkpointing == AUTO:
            self._recomputed = recomputed_units(recording, self._request)
            recording = with_recomputation(recording, self._recomputed)
        self._recordings.append((num_stages, recording))
        return recording

    def _is_head_for(self, recording: RecordedModel, made_for: int, num_stages: int) -> bool:
        """Whether the head that was cut for ``made_for`` stages is cut into as many parts for ``num_stages``."""
        if made_for == num_stages:
            return True
        whole = recording.whole or recording
        step = whole.units, whole.record, whole.num_parameters, self.options.split_head
        return head_to_split(*step, made_for) == head_to_split(*step, num_stages)

    def _with_refined(self, num_stages: int, names: Collection[str], num_head_parts: int) -> RecordedModel | None:
        """The model with units refined and its head in so many parts; None if its step cannot be recorded so."""
        for made_for, recording in self._recordings:  # other parts of a head make no other recording of this
            if made_for <= num_stages <= len((recording.whole or recording).record.first_calls()):
                num_stages = made_for
        key = num_stages, frozenset(names), num_head_parts
        if key not in self._refined:
            try:
                refined = self._record(num_stages, names, num_head_parts or False)
                self._refined[key] = with_recomputation(refined, self._recomputed) if self._recomputed else refined
            except Exception:  # of the user's code, too, which is not run so then
                self._refined[key] = None
        return self._refined[key]

    def _record(
        self,
        num_stages: int,
        refined: Collection[str] = (),
        split_head: SplitHead | None = None,
        like: RecordedModel | None = None,
    ) -> RecordedModel:
        recorded = record_model(
            self.module,
            device=self._device.here,
            step=self._step.step,
            with_gradients=True,
            patterns=self.options.cut.units,
            num_stages=num_stages,
            how=RecordingOptions(
                self._step.dtypes.compute,
                self.options.recorded_checkpointing,
                split_head=self.options.split_head if split_head is None else split_head,
                refined={*refined, *self.options.refined_units(self.module)},
                tensor=self.options.tensor_ranks(self.sizes.tensor),
            ),
            like=like,
        )
        return _checked(recorded, self.sizes.tensor)

    def on_tensor_ranks(self, recording: RecordedModel, like: RecordedModel | None = None) -> RecordedModel:
        """``recording``, made for one tensor rank, for those that there are; ``like`` as of :meth:`recording`."""
        ranks = self.options.tensor_ranks(self.sizes.tensor)
        return _checked(on_tensor_ranks(recording, ranks, like), ranks.size)


def _checked(recording: RecordedModel, num_tensor_ranks: int) -> RecordedModel:
    if recording.not_on_parts is not None:
        raise SplitError(
            f"The step cannot be recorded on parts of tensor_parallel_size={num_tensor_ranks}: "
            f"{recording.not_on_parts} Use tensor_parallel_size=1."
        )
    return recording
