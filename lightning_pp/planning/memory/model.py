"""How bytes are counted for a run: its optimizer, dtypes and sharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.planning.stage_costs import DeviceSpeed, assumed_speed, estimated_costs
from lightning_pp.schedule import Placement, Schedule
from lightning_pp.schedule.offloading import with_offloading
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.memory.estimate import MemoryEstimate, estimate_memory
from lightning_pp.split.memory.state_memory import ParameterSize, StateSizes, StepDtypes, optimizer_bytes_per_parameter
from lightning_pp.split.record.step_record import StepRecord

# AdamW's two states in float32: what is assumed of an optimizer that cannot be asked
_ASSUMED_OPTIMIZER_BYTES = 8.0


@dataclass(frozen=True)
class MemoryModel:
    """How the bytes of a rank are counted.

    Attributes:
        state: Counts parameters, gradients and the optimizer's state.
        trains: Whether there are gradients.
        assumed: What had to be assumed, in words; empty if nothing.
        whole_batch_loss: Whether the code after the last unit runs once, on all microbatches joined.
        offload_speed: By whose times activations wait on the host; None: they do not.
    """

    state: StateSizes = field(default_factory=StateSizes)
    trains: bool = True
    assumed: str = ""
    whole_batch_loss: bool = False
    offload_speed: DeviceSpeed | None = None

    @classmethod
    def of(
        cls,
        settings: ShardingSettings,
        num_shards: int,
        dtypes: StepDtypes,
        *,
        trains: bool = True,
        options: ScheduleOptions | None = None,
        device_type: str = "cpu",
        optimizer: Optimizer | None = None,
    ) -> MemoryModel:
        """For the sharding and the precision of a run.

        Args:
            settings: The strategy's arguments about sharding.
            num_shards: Ranks that share the parameters of a stage.
            dtypes: Of computation and of gradients.
            trains: Whether the step is a training step.
            options: What the user asks of the schedule.
            device_type: Of the device that computes.
            optimizer: Asked for its state; without one AdamW's is assumed.
        """
        is_whole = settings.mode == "replicate" or (num_shards == 1 and not settings.cpu_offload)
        state = StateSizes(
            dtypes,
            "replicate" if is_whole else settings.mode,
            1 if is_whole else num_shards,
            settings.unshard_budget,
            _ASSUMED_OPTIMIZER_BYTES if trains else 0.0,
            settings.cpu_offload,
            num_shards if settings.mode == "replicate" and trains else 1,
            keeps_copies=trains and options is not None and options.post_validation,
        )
        speed = assumed_speed(device_type) if trains and options is not None and options.activation_offload else None
        assumed = "no optimizer: AdamW is assumed" if trains else ""
        model = cls(state, trains, assumed, options is not None and options.whole_batch_loss, speed)
        return model if optimizer is None else model.with_optimizer(optimizer)

    def with_optimizer(self, optimizer: Optimizer) -> MemoryModel:
        """With the state that ``optimizer`` keeps; AdamW's is assumed of one that cannot be asked."""
        sizes = Counter[torch.dtype]()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                sizes[parameter.dtype] += parameter.numel()
        dtype = sizes.most_common(1)[0][0] if sizes else torch.float32
        try:
            num_bytes = optimizer_bytes_per_parameter(optimizer, dtype)
        except ConfigurationError as error:
            return replace(self, assumed=f"{error} AdamW's state is assumed.")
        return replace(self, state=replace(self.state, optimizer_bytes=num_bytes), assumed="")

    def estimate(
        self,
        record: StepRecord,
        partition: Partition,
        placement: Placement,
        parameters: Sequence[ParameterSize],
        schedule: Schedule | None = None,
    ) -> MemoryEstimate:
        """What stages and ranks hold; the arguments are those of :func:`estimate_memory`."""
        schedule = self.with_offloading(record, partition, placement, schedule)
        if not self.trains:
            parameters = [replace(parameter, is_trainable=False) for parameter in parameters]
        return estimate_memory(
            record,
            partition,
            placement,
            parameters,
            self.state,
            schedule=schedule,
            whole_batch_loss=self.whole_batch_loss and self.trains,
        )

    def with_offloading(
        self, record: StepRecord, partition: Partition, placement: Placement, schedule: Schedule | None
    ) -> Schedule | None:
        """``schedule`` with OFFLOAD and RELOAD, if activations wait on the host and it has none."""
        if schedule is None or self.offload_speed is None:
            return schedule
        costs = estimated_costs(record, partition, placement, self.offload_speed, offloads=True)
        return with_offloading(schedule, costs)
