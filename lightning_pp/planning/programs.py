"""Programs for the numbers of microbatches at hand."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Placement, Schedule, StageCosts, build_forward_only, build_schedule
from lightning_pp.schedule.fewer_microbatches import keep_first_microbatches
from lightning_pp.schedule.merging import split_backwards


class ProgramCache:
    """Programs by number of microbatches, made when first needed, on every rank alike.

    A named schedule is built for each number. One that was read from a file or searched for is there for one number:
    for fewer its first microbatches are kept; for more a file is refused, and a quick search is made.

    Args:
        name: Name of the schedule.
        placement: Which rank holds which stages.
        costs: Costs per stage, for the schedules that look at them.
        memory_limit: What a rank may hold, one number or one per rank, in the unit of ``costs.held_*``; None for no
            limit.
        basis: The schedule to keep microbatches of; None for one that is built by name.
        whole_batch_loss: Whether forwards come first, as in :meth:`Schedule.with_whole_batch_loss`; in ``basis`` too.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        costs: StageCosts,
        memory_limit: float | Sequence[float] | None = None,
        basis: Schedule | None = None,
        *,
        whole_batch_loss: bool = False,
    ) -> None:
        self._whole_batch_loss = whole_batch_loss
        self._name = name
        self._placement = placement
        self._costs = costs
        self._memory_limit = memory_limit
        self._basis = basis
        self._training: dict[int, Schedule] = {}
        self._measured: dict[int, Schedule] = {}
        self._evaluation: dict[int, Schedule] = {}

    def use(self, basis: Schedule, costs: StageCosts, memory_limit: float | Sequence[float] | None) -> None:
        """From now on programs come from ``basis``, and these costs and limits count."""
        self._basis, self._costs, self._memory_limit = basis, costs, memory_limit
        self._training.clear()
        self._measured.clear()

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
            self._evaluation[num_microbatches] = build_forward_only(self._placement, num_microbatches)
        return self._evaluation[num_microbatches]

    def _make(self, num_microbatches: int) -> Schedule:
        basis = self._basis
        if basis is not None and num_microbatches <= basis.num_microbatches:
            return keep_first_microbatches(basis, num_microbatches)
        if self._name.endswith(".csv"):
            most = 0 if basis is None else basis.num_microbatches
            raise ScheduleError(
                f"The batch is cut into {num_microbatches} microbatches, and {self._name} is for {most}: set "
                f"num_microbatches={most} (or 'auto', which takes the file's), or write a schedule for "
                f"{num_microbatches}."
            )
        schedule = build_schedule(
            self._name,
            num_ranks=self._placement.num_ranks,
            num_microbatches=num_microbatches,
            stages_per_rank=self._placement.num_stages // self._placement.num_ranks,
            costs=self._costs,
            memory_limit=self._memory_limit,
            placement=self._placement,
            quick=True,
            whole_batch_loss=self._whole_batch_loss,
        )
        return schedule.validate()
