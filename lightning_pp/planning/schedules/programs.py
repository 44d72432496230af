"""Programs for the numbers of microbatches at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_pp.planning.schedules.source import ScheduleSource
from lightning_pp.schedule import Placement, Schedule, StageCosts, build_forward_only
from lightning_pp.schedule.fewer_microbatches import keep_first_microbatches
from lightning_pp.schedule.merging import split_backwards


@dataclass(frozen=True, eq=False)
class ProgramCache:
    """Programs by number of microbatches, made when first needed, on every rank alike.

    What was searched for is there for one number: for fewer its first microbatches are kept, for more a quick search is
    made. Of all others the source is asked for each number.

    Attributes:
        source: Where programs come from.
        placement: Which rank holds which stages.
        costs: Costs per stage, for the schedules that look at them.
        memory_limit: What a rank may hold, one number or one per rank, in the unit of ``costs.held_*``; None for no
            limit.
        found: The schedule that was searched for; None where none was.
    """

    source: ScheduleSource
    placement: Placement
    costs: StageCosts
    memory_limit: float | Sequence[float] | None = None
    found: Schedule | None = None
    _training: dict[int, Schedule] = field(default_factory=dict, init=False)
    _measured: dict[int, Schedule] = field(default_factory=dict, init=False)
    _evaluation: dict[int, Schedule] = field(default_factory=dict, init=False)

    def training(self, num_microbatches: int) -> Schedule:
        """Forward and backward of a batch of ``num_microbatches``.

        Raises:
            ScheduleError: A file has fewer microbatches, or no schedule of that name keeps the memory limit.
        """
        if num_microbatches not in self._training:
            self._training[num_microbatches] = self._make(num_microbatches)
        return self._training[num_microbatches]

    def measured(self, num_microbatches: int) -> Schedule:
        """As :meth:`training`, with I and W apart, so that both can be timed."""
        if num_microbatches not in self._measured:
            self._measured[num_microbatches] = split_backwards(self.training(num_microbatches))
        return self._measured[num_microbatches]

    def evaluation(self, num_microbatches: int) -> Schedule:
        """Forward only."""
        if num_microbatches not in self._evaluation:
            self._evaluation[num_microbatches] = build_forward_only(self.placement, num_microbatches)
        return self._evaluation[num_microbatches]

    def _make(self, num_microbatches: int) -> Schedule:
        if self.found is not None and num_microbatches <= self.found.num_microbatches:
            return keep_first_microbatches(self.found, num_microbatches)
        return self.source.program(
            self.placement, num_microbatches, self.costs, self.memory_limit, quick=True, on_every_rank=True
        )
