"""The strategy's arguments that training and planning share, in groups that check themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from lightning_pp.distributed.sizes import Auto, check_size
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.activation_checkpointing import (
    AUTO,
    ActivationCheckpointing,
    check_activation_checkpointing,
    policy_of,
)
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.planning.tensor_parts import TensorRanks
from lightning_pp.split.data.microbatch import BatchDim, SplitBatch
from lightning_pp.split.head.choice import SplitHead
from lightning_pp.split.unit_calls.units import discover_units
from lightning_pp.tensor.plans import Plan

OnNonFinite = Literal["error", "skip", "ignore"]
UnequalData = Literal["error", "shortest"]
Auxiliary = Literal["error", "per_microbatch"]


@dataclass(frozen=True)
class BatchOptions:
    """The strategy's arguments that concern batches.

    Attributes:
        num_microbatches: Slices of a batch.
        split_batch: Cuts a batch; None: along dimension 0.
        check_first_batches: Whether a run's first batches are compared with parts of them.
        on_nonfinite: Reaction to a loss or gradient that is not finite: ``"error"``, ``"skip"`` or ``"ignore"``.
        unequal_data: Reaction to ranks with different numbers of batches: ``"error"`` or ``"shortest"``.
        dynamic_step: Whether every microbatch is rehearsed.
        batch_dim: The dimension of samples of tensors, by path, if it is not 0.
        auxiliary_losses: Of products of means over samples in the loss: ``"error"`` or ``"per_microbatch"``.

    Raises:
        ConfigurationError: A value is not of its kind.
    """

    num_microbatches: int | Auto = "auto"
    split_batch: SplitBatch | None = None
    check_first_batches: bool = True
    on_nonfinite: OnNonFinite = "error"
    unequal_data: UnequalData = "error"
    dynamic_step: bool = False
    batch_dim: BatchDim = None
    auxiliary_losses: Auxiliary = "error"

    def __post_init__(self) -> None:
        check_size("num_microbatches", self.num_microbatches)
        choices = {"on_nonfinite": OnNonFinite, "unequal_data": UnequalData, "auxiliary_losses": Auxiliary}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in get_args(known):
                raise ConfigurationError(f"{name}={value!r} is unknown; it is one of {', '.join(get_args(known))}.")
        if self.split_batch is not None and not callable(self.split_batch):
            raise ConfigurationError(
                f"split_batch={self.split_batch!r} must be a function of a batch and the largest number of "
                "microbatches."
            )
        dims = {} if self.batch_dim is None else self.batch_dim
        if not isinstance(dims, Mapping) or not all(type(dim) is int for dim in dims.values()):
            raise ConfigurationError(f"batch_dim={dims!r} must be a dict from paths of tensors to dimensions.")
        if self.split_batch is not None and self.batch_dim:
            raise ConfigurationError("split_batch= cuts the whole batch, so batch_dim= has no effect. Leave one out.")


@dataclass(frozen=True)
class PipelineOptions:
    """The user's options for a pipeline that decide where a model is cut and in which order it runs.

    Attributes:
        schedule: What is asked of the schedule.
        batches: How batches are cut.
        cut: What the user says of the cuts.
        sharding: Inside stages.
        activation_checkpointing: What is run again in backward.
        device_memory_gib: What a rank may hold altogether; None for no limit.
        tensor_parallel_plan: Which matrices are cut over the tensor ranks.
        sequence_parallel: Whether what lies between cut matrices of a unit is on parts of the sequence.

    Raises:
        ConfigurationError: A value is not of its kind, or a schedule's file has too few microbatches.
    """

    schedule: ScheduleOptions
    batches: BatchOptions = field(default_factory=BatchOptions)
    cut: CutOptions = field(default_factory=CutOptions)
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    activation_checkpointing: ActivationCheckpointing = False
    device_memory_gib: float | None = None
    tensor_parallel_plan: Plan = "auto"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        limit = self.device_memory_gib
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise ConfigurationError(f"device_memory_gib={limit!r} must be a number above 0, or None for no limit.")
        check_activation_checkpointing(self.activation_checkpointing)
        if self.activation_checkpointing == AUTO and limit is None:
            raise ConfigurationError(
                "activation_checkpointing='auto' recomputes as few blocks as device_memory_gib asks for, but that is "
                "not given. Set device_memory_gib, or activation_checkpointing=True for all blocks."
            )
        if self.schedule.activation_offload and policy_of(self.activation_checkpointing) is not None:
            raise ConfigurationError(
                "activation_offload=True cannot move the tensors that a policy of activation_checkpointing saves: "
                "checkpointed units keep these themselves. Name units in activation_checkpointing, or leave "
                "activation_offload out."
            )
        self.schedule.source.check_sizes("auto", self.batches.num_microbatches)

    @property
    def num_microbatches(self) -> int | Auto:
        """Slices of a batch, which a schedule's file may say."""
        return self.schedule.source.num_microbatches(self.batches.num_microbatches)

    @property
    def recorded_checkpointing(self) -> ActivationCheckpointing:
        """What is run again in backward before a limit of memory has been looked at."""
        return False if self.activation_checkpointing == AUTO else self.activation_checkpointing

    @property
    def split_head(self) -> SplitHead:
        """In how many parts to cut a head; in none where the end of the step runs on the whole batch."""
        return False if self.schedule.whole_batch_loss else self.cut.split_head

    @property
    def allows_one_stage(self) -> bool:
        """Whether one rank may have the module as one stage, which leaves nothing to record, cut or schedule.

        Not if something is asked for that a pipeline's engine does with one stage too: activation checkpointing,
        shards on the host, a limit of memory, costs in a file, named cuts.
        """
        asks_for_engine = (
            self.activation_checkpointing is not False
            or self.sharding.cpu_offload
            or self.device_memory_gib is not None
            or self.schedule.save_costs is not None
            or bool(self.cut.split_points)
        )
        return not asks_for_engine and any(
            placement.num_stages == 1 for placement in self.schedule.source.placements(1)
        )

    def refined_units(self, module: nn.Module) -> set[str]:
        """The units of ``module`` in which a cut is asked for, by ``split_points`` or by costs that were measured so.

        It is empty where the user says what units are.
        """
        if self.cut.units is not None:
            return set()
        costs = self.schedule.costs
        measured = [name for names in (costs.units if costs is not None else None) or () for name in names]
        inside = [*(self.cut.split_points or ()), *measured]
        return {unit for unit in discover_units(module) for name in inside if name.startswith(f"{unit}.")}

    def tensor_ranks(self, size: int) -> TensorRanks:
        """How so many ranks share matrices.

        Raises:
            ConfigurationError: They do, and activations are to wait on the host.
        """
        if size > 1 and self.schedule.activation_offload:
            raise ConfigurationError(
                f"activation_offload=True does not work with tensor_parallel_size={size}: tensor ranks hold parts of "
                "activations, and parts are not moved. Leave one of the two out."
            )
        is_deferred = not self.schedule.whole_batch_loss
        return TensorRanks(size, self.tensor_parallel_plan, self.sequence_parallel, is_deferred)
