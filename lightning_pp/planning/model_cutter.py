"""A model recorded and cut: training, its plan and the search of plans all ask here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.errors import SplitError
from lightning_pp.planning.activation_checkpointing import AUTO
from lightning_pp.planning.hardware.devices import PLANNED_ON_CPU, PlannedDevice
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.refinement.choice import CutChoice, Decided
from lightning_pp.planning.refinement.recomputed import about_recomputed, recomputed_units
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
from lightning_pp.planning.tuning import Layout, LayoutRequest
from lightning_pp.planning.unit_times.measure import UnitTimes
from lightning_pp.schedule import Placement
from lightning_pp.split.data.microbatch import Microbatch, batch_size_of
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.dry_run.weight_updates import Updates
from lightning_pp.split.head.choice import head_to_split
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


class TrainingRanks(NamedTuple):
    """How the ranks of a training come to the same cut; each has a cutter, and asks it the same in the same order.

    Attributes:
        decided: Returns on every rank what its argument returns on the rank that decides.
        recorded: Returns the recording that its argument makes; raises on every rank if that fails on one.
    """

    decided: Decided
    recorded: Callable[[Callable[[], RecordedModel]], RecordedModel]


@dataclass(frozen=True)
class StepToCut:
    """The step for which a model is cut.

    Attributes:
        batch: A batch of one replica.
        microbatches: What it is cut into.
        step: The user's step on the first microbatch, for a dry run.
        optimizer: The user's optimizer over the whole module; None where there is none.
        dtypes: Of computation and of gradients, where they are not the parameters'.
        trains: Whether it is a training step.
        ranks: Of the training that follows; it may do what cannot be recorded, so that this is no error. None: a plan.
    """

    batch: Any
    microbatches: Sequence[Microbatch]
    step: Callable[[DryRun], Any]
    optimizer: Optimizer | None = None
    dtypes: StepDtypes = field(default_factory=StepDtypes)
    trains: bool = True
    ranks: TrainingRanks | None = None


class ModelCutter:
    """Records a module's step and cuts the module, for one placement after another; the module is left as it was.

    Args:
        module: The whole module; its parameters may be on the meta device.
        options: What the user says of the pipeline.
        sizes: Of the pipeline.
        step: The step, of training where it is planned.
        device: What is planned for.
        recordings: Recordings of the step that there are, each with the number of stages that its units were found
            for; others are made when they are needed.
        refines: Whether cuts may fall inside of blocks, as in training; that takes more recordings for each placement.

    Attributes:
        microbatch: The first microbatch, which is what the step is recorded with.
        num_microbatches: How many there are.
        optimizer: The user's, over the whole module; None where there is none.
        about_recomputed: Which blocks ``activation_checkpointing="auto"`` recomputes, a sentence; empty without it.
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
        self.microbatch = step.microbatches[0]
        self.num_microbatches = len(step.microbatches)
        self._step, self.optimizer = step, step.optimizer
        self._device = device
        self._recordings = list(recordings)
        self._refines = refines
        self._decided: Decided = step.ranks.decided if step.ranks else lambda compute: compute()
        self._updates: Updates = {}
        self._communicators_bytes = 0
        self._refined: dict[tuple[int, frozenset[str], int], RecordedModel | None] = {}
        self._unit_times: UnitTimes | None = None
        self._recomputed: list[str] = []
        self.about_recomputed = ""

    @property
    def batch_size(self) -> int | None:
        """Samples in the batch; None if they cannot be counted."""
        return batch_size_of(self._step.batch, self.options.batches.batch_dim)

    @property
    def fewest_stages(self) -> int:
        """Stages that there have to be units for."""
        return self._request().fewest_stages

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
        return CutChoice(recording, lambda one: self._request(one, source), again, self._decided)

    def layout(self, recording: RecordedModel) -> tuple[RecordedModel, Layout]:
        """What training lays out of ``recording``, one that is kept, perhaps with blocks refined, and how.

        Raises:
            ConfigurationError, SplitError, ScheduleError: As :func:`lightning_pp.planning.tuning.best_layout` says.
        """
        return self._choice(recording).layout()

    def placement(self) -> Placement:
        """Where training would put the stages.

        Raises:
            ConfigurationError, SplitError, ScheduleError: As :meth:`layout` says.
        """
        request = self._request()
        if len(request.placements) == 1:
            return request.placements[0]
        return self.layout(self.recording(request.fewest_stages))[1].placement

    @cached_property
    def memory_model(self) -> MemoryModel:
        """How bytes are counted."""
        return MemoryModel.of(
            self.options.sharding,
            self.sizes.data_parallel_shard,
            self._step.dtypes,
            trains=self._step.trains,
            options=self.options.schedule,
            device_type=self._device.type,
            optimizer=self.optimizer,
        )

    def count(self, optimizer: Optimizer | None, updates: Updates, communicators_bytes: int) -> None:
        """Has a limit of memory count what a training knows: an optimizer, which is not kept, and what hooks update."""
        self._updates, self._communicators_bytes = updates, communicators_bytes
        if self.options.device_memory_gib is not None and optimizer is not None:
            self.memory_model = self.memory_model.with_optimizer(optimizer)

    def memory(self, recording: RecordedModel) -> DeviceMemory | None:
        """The memory limit of a rank for ``recording``; None for no limit."""
        limit = self.options.device_memory_gib
        if limit is None:
            return None
        return DeviceMemory(limit, self.memory_model, recording, self._updates, self._communicators_bytes)

    def _request(self, recording: RecordedModel | None = None, source: ScheduleSource | None = None) -> LayoutRequest:
        options, memory = self.options.schedule, None
        if source is not None:
            options = replace(options, source=source)
        if recording is not None:
            memory = self.memory(recording)
            if self._unit_times is not None:
                options = replace(options, costs=self._unit_times.of(recording))
        cut = replace(self.options.cut, flops_per_byte=self._device.flops_per_byte)
        return LayoutRequest(options, self.sizes.pipeline, self.num_microbatches, cut, self._device.type, memory)

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
        return self.keep(num_stages, self.record(num_stages, like=like))

    def keep(self, num_stages: int, recording: RecordedModel) -> RecordedModel:
        """``recording``, one for so many stages, as it serves from here on: with what has to be recomputed."""
        limit_gib = self.options.device_memory_gib
        if self.options.activation_checkpointing == AUTO and self._step.trains and limit_gib is not None:
            self._recomputed = self._decided(partial(recomputed_units, recording, self._request))
            self.about_recomputed = about_recomputed(self._recomputed, recording, limit_gib)
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
            self._refined[key] = None
            with suppress(Exception):  # of the user's code, too, which is not run so then
                record, ranks = partial(self.record, *key), self._step.ranks
                self._refined[key] = ranks.recorded(record) if ranks else record()
        return self._refined[key]

    def record(
        self,
        num_stages: int,
        refined: Collection[str] = (),
        num_head_parts: int | None = None,
        like: RecordedModel | None = None,
    ) -> RecordedModel:
        """A dry run of the step, with units for so many stages; ``refined`` and the head in parts where asked."""
        step, split_head = self._step, self.options.split_head if num_head_parts is None else num_head_parts or False
        may_fail = step.ranks is not None
        is_noted = self.sizes.tensor > 1 or not may_fail  # a search makes recordings for tensor ranks of one
        recorded = record_model(
            self.module,
            device=self._device.here,
            step=step.step,
            with_gradients=step.trains,
            patterns=self.options.cut.units,
            num_stages=num_stages,
            how=RecordingOptions(
                step.dtypes.compute,
                self.options.recorded_checkpointing,
                may_fail,
                split_head if step.trains else False,
                {*refined, *self.options.refined_units(self.module)},
                self.options.tensor_ranks(self.sizes.tensor) if is_noted else None,
            ),
            like=like,
        )
        if refined and self._recomputed:
            recorded = with_recomputation(recorded, self._recomputed)
        return recorded if may_fail else _checked(recorded, self.sizes.tensor)

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
