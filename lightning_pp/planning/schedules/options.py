"""The user's options for the schedule, checked as far as possible without devices and model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.schedules.given_costs import GivenCosts
from lightning_pp.planning.schedules.source import ScheduleSource
from lightning_pp.schedule import Placement, Schedule, StageCosts

DEFAULT_NUM_PROFILED_BATCHES = 8


@dataclass(frozen=True)
class ScheduleOptions:
    """The strategy's arguments that concern the schedule.

    Attributes:
        source: Where programs come from.
        memory_limit_gib: What a rank may hold of microbatches between their F and W, or None.
        costs: Given costs, or None.
        num_profiled_batches: Batches to measure.
        save_costs: Where measured costs are written, or None.
        activation_offload: Whether activations may wait on the host for their backward.
        post_validation: Whether updates with clipping by norm are made before the norm is known.

    Raises:
        ConfigurationError: A number is out of range, or a value not of its kind.
    """

    source: ScheduleSource
    memory_limit_gib: float | None = None
    costs: GivenCosts | None = None
    num_profiled_batches: int = DEFAULT_NUM_PROFILED_BATCHES
    save_costs: str | PathLike[str] | None = None
    activation_offload: bool = False
    post_validation: bool = False

    def __post_init__(self) -> None:
        limit, number = self.memory_limit_gib, self.num_profiled_batches
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise ConfigurationError(f"memory_limit_gib={limit!r} must be a number above 0, or None for no limit.")
        if isinstance(number, bool) or number < 1:
            raise ConfigurationError(f"num_profiled_batches={number!r} must be an integer of at least 1.")
        for name in ("activation_offload", "post_validation"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigurationError(f"{name}={value!r} must be True or False.")

    @property
    def whole_batch_loss(self) -> bool:
        """Whether the code after the last unit runs once, on the outputs of all microbatches joined."""
        return self.source.whole_batch_loss

    @property
    def searches_again(self) -> bool:
        """Whether measured costs are to change the schedule: its order, or when copies to the host are made."""
        return self.costs is None and (self.source.is_searched or self.activation_offload)

    @property
    def measures(self) -> bool:
        """Whether the first batches are measured."""
        return self.searches_again or self.save_costs is not None

    def memory_limit(
        self, costs: StageCosts, placement: Placement, room_gib: tuple[float, ...] | None = None
    ) -> float | tuple[float, ...] | None:
        """What microbatches may hold on each rank, GiB; see :meth:`ScheduleSource.memory_limit`."""
        return self.source.memory_limit(self.memory_limit_gib, costs, placement, room_gib)

    def check_num_ranks(self, num_ranks: int) -> None:
        """Raises :class:`ConfigurationError` unless the schedule and the costs can be for so many ranks."""
        self.source.check_sizes(num_ranks)
        if self.costs is not None:
            self.costs.check_num_stages(num_ranks, self.source.num_stages(num_ranks))

    def whole_batch_text(self, schedule: Schedule) -> str:
        """What ``whole_batch_loss`` does to ``schedule``, for the log."""
        reordered = " The file has another order; its actions were reordered." if self.source.is_reordered else ""
        return (
            f"whole_batch_loss=True: {schedule.name} runs all forwards of a batch before its backwards, and holds all "
            f"{schedule.num_microbatches} microbatches at once.{reordered}"
        )
