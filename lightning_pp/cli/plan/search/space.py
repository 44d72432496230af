"""The plans that a search compares: sizes, microbatches, schedules, sharding and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_pp.cli.earlier_run import as_override
from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.planning.activation_checkpointing import ActivationCheckpointing
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.schedule.registry import build_schedule, schedule_family
from lightning_pp.schedule.sharding import SHARDING_MODES, ShardingMode
from lightning_pp.schedule.simulation.costs import UNIT_COSTS
from lightning_pp.schedule.simulation.memory import peaks_of

_MORE_STAGES_PER_RANK = (2, 4)
"""Tried besides a family's usual number, if twice as large and allowed by the family."""
_MOST_MICROBATCHES_PER_RANK = 8
"""The bubble is small then. Microbatches of one sample, which hold least memory, are always tried."""
MODEL_CHECKPOINTS = "model.activation_checkpointing"
"""The packaged models' own switch, which a search replaces by the strategy's."""


@dataclass(frozen=True)
class Layout:
    """The sizes and the schedule on which a cut, and the time of a step on one replica, depend.

    Attributes:
        num_ranks: Ranks of the pipeline.
        num_replicas: Of the pipeline.
        batch_size: Samples of one replica's batch.
        num_microbatches: Which divides them.
        schedule: Its name.
        stages_per_rank: Stages on each rank.
        activation_checkpointing: The strategy's.
        num_tensor_ranks: Ranks that share the matrices of a stage.
    """

    num_ranks: int
    num_replicas: int
    batch_size: int
    num_microbatches: int
    schedule: str
    stages_per_rank: int
    activation_checkpointing: ActivationCheckpointing
    num_tensor_ranks: int = 1

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch."""
        return self.batch_size // self.num_microbatches

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.num_ranks * self.stages_per_rank

    @property
    def stages_per_rank_asked(self) -> int | None:
        """The strategy's ``stages_per_rank``; None where that is usual for the schedule."""
        family = schedule_family(self.schedule)
        is_usual = not family.is_search and self.stages_per_rank == family.default_stages_per_rank
        return None if is_usual else self.stages_per_rank


@dataclass(frozen=True)
class ShardingChoice:
    """What data-parallel ranks shard.

    Attributes:
        mode: The strategy's ``sharding``.
        replicate_size: Its ``data_parallel_replicate_size``.
    """

    mode: ShardingMode
    replicate_size: int = 1


@dataclass(frozen=True)
class Space:
    """The choices of a search.

    Attributes:
        num_devices: Devices in all.
        devices_per_node: Of which so many are on a node.
        num_samples: Of all replicas in a batch, the same in every plan.
        fixed_replicas: The number of replicas, where the samples of a replica's batch cannot be changed; else None.
        schedules: Names.
        activation_checkpointing: Values of the strategy's argument.
        sharding: As configured.
        tensor_sizes: Numbers of ranks that may share the matrices of a stage.
    """

    num_devices: int
    devices_per_node: int
    num_samples: int
    fixed_replicas: int | None
    schedules: Sequence[str]
    activation_checkpointing: Sequence[ActivationCheckpointing]
    sharding: ShardingSettings
    tensor_sizes: Sequence[int] = (1,)

    def layouts(self) -> Iterator[Layout]:
        """All of them, those with few stages first.

        A pipeline has from one to eight microbatches for each rank, or one for each sample.
        """
        for num_tensor_ranks in self.tensor_sizes:
            for num_ranks in _divisors(self.num_devices // num_tensor_ranks):
                num_replicas = self.num_devices // num_tensor_ranks // num_ranks
                if self.num_samples % num_replicas or self.fixed_replicas not in (None, num_replicas):
                    continue
                yield from self._layouts(num_ranks, num_replicas, num_tensor_ranks)

    def _layouts(self, num_ranks: int, num_replicas: int, num_tensor_ranks: int) -> Iterator[Layout]:
        batch_size = self.num_samples // num_replicas
        for number in self._num_microbatches(num_ranks, batch_size):
            for schedule, stages_per_rank in self._schedules(num_ranks):
                for checkpointing in self.activation_checkpointing:
                    yield Layout(
                        num_ranks, num_replicas, batch_size, number, schedule, stages_per_rank, checkpointing,
                        num_tensor_ranks,
                    )  # fmt: skip

    def _num_microbatches(self, num_ranks: int, batch_size: int) -> list[int]:
        if batch_size < num_ranks:
            return [batch_size]
        most = _MOST_MICROBATCHES_PER_RANK * num_ranks
        return [number for number in _divisors(batch_size) if num_ranks <= number <= most or number == batch_size]

    def _schedules(self, num_ranks: int) -> Iterator[tuple[str, int]]:
        """Names with stages on each rank; one rank has nothing to wait for, and takes one that holds least."""
        names = [(name, schedule_family(name)) for name in self.schedules]
        if num_ranks == 1:
            alone = [name for name, family in names if family.allows(1)]
            if alone:
                yield min(alone, key=_held_by_one_rank), 1
            return
        for name, family in names:
            usual = family.default_stages_per_rank
            yield name, usual
            more = 2 * usual
            if more in _MORE_STAGES_PER_RANK and family.allows(more):
                yield name, more

    def sharding_of(self, layout: Layout) -> list[ShardingChoice]:
        """What the replicas of ``layout`` may share, the least first; one replica has nothing to share."""
        if layout.num_replicas == 1:
            return [ShardingChoice(self.sharding.mode)]
        sizes = ParallelSizes(layout.num_ranks, layout.num_replicas, tensor=layout.num_tensor_ranks)
        within = sizes.replicate_size_within_nodes(self.devices_per_node)
        copies = sorted({1, within or 1}, reverse=True)
        found = []
        for mode in SHARDING_MODES:
            if mode == "replicate":
                if not self.sharding.cpu_offload and self.sharding.unshard_budget is None:
                    found.append(ShardingChoice(mode))
            elif self.sharding.unshard_budget is None or mode == "full_shard":
                found += [ShardingChoice(mode, number) for number in copies]
        return found


def _held_by_one_rank(name: str) -> float:
    """The most of two microbatches that a rank by itself holds at a time; a search is the last to be taken."""
    if schedule_family(name).is_search:
        return float("inf")
    return peaks_of(build_schedule(name, num_ranks=1, num_microbatches=2, stages_per_rank=1), UNIT_COSTS)[0]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def words_of(layout: Layout, sharding: ShardingChoice, config: DictConfig, batch_size_key: str | None) -> list[str]:
    """What to write on the command line for a plan, without what ``config`` has already.

    Args:
        layout: Of the plan.
        sharding: Of the plan.
        config: What is configured.
        batch_size_key: Where the config has the samples of one replica's batch; None if nowhere.
    """
    values: dict[str, Any] = {
        "strategy.pipeline_parallel_size": layout.num_ranks,
        "strategy.data_parallel_size": layout.num_replicas,
        "strategy.tensor_parallel_size": layout.num_tensor_ranks,
        "strategy.data_parallel_replicate_size": sharding.replicate_size,
        "strategy.num_microbatches": layout.num_microbatches,
        "strategy.schedule": layout.schedule,
        "strategy.stages_per_rank": layout.stages_per_rank_asked,
        "strategy.sharding": sharding.mode,
        "strategy.activation_checkpointing": layout.activation_checkpointing,
    }
    if not schedule_family(layout.schedule).is_search:
        values["strategy.search_seconds"] = None
    if batch_size_key is not None:
        values[batch_size_key] = layout.batch_size
    if OmegaConf.select(config, MODEL_CHECKPOINTS) is not None:
        values[MODEL_CHECKPOINTS] = False
    return [
        f"{key}={value if isinstance(value, str) else as_override(value)}"
        for key, value in values.items()
        if not _is_value(config, key, value)
    ]


def _is_value(config: DictConfig, key: str, value: Any) -> bool:
    """Whether the config has ``value`` there, or leaves it to what follows from the rest."""
    found = OmegaConf.select(config, key)
    if key == "strategy.data_parallel_size" and found == "auto":
        return True
    if isinstance(found, ListConfig):
        found = OmegaConf.to_container(found)
    return type(found) is type(value) and bool(found == value)
