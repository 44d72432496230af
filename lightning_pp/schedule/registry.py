"""The one entry point that makes a schedule by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.merging import merge_first_stage
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.program.whole_batch import HELPS_WHOLE_BATCH
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.sharding import Sharding
from lightning_pp.schedule.simulation.costs import UNIT_COSTS, StageCosts
from lightning_pp.schedule.simulation.memory import exceeds, peaks_of
from lightning_pp.schedule.validation import limit_of_each_rank


@dataclass(frozen=True)
class ScheduleRequest:
    """The request to a family; its sizes have been checked.

    Attributes:
        num_ranks: Number of ranks of the pipeline, ``p``.
        num_microbatches: Number of microbatches of a step, ``m``.
        stages_per_rank: Number of stages on each rank, ``v``.
        costs: Costs per stage; families that do not look at costs ignore them.
        memory_limit: For each rank the most it may hold, in the unit of the costs, or None.
        placement: Where the stages have to be, for families that can choose; None leaves it to them.
        quick: Leave out what takes long, for families that search.
        sharding: What the stages gather and reduce, for families that compare schedules; None: each stage is gathered
            once, from the start of the step.
        whole_batch_loss: Whether no backward may start before the last forward of the last stage; families that search
            look at it, programs of the others are changed afterwards.
        search_seconds: How long families that search may try; None: as long as their effort takes.
    """

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int
    costs: StageCosts
    memory_limit: tuple[float, ...] | None
    placement: Placement | None = None
    quick: bool = False
    sharding: Sharding | None = None
    whole_batch_loss: bool = False
    search_seconds: float | None = None


@dataclass(frozen=True)
class Family:
    """A way to build schedules.

    Attributes:
        name: What the user writes.
        build: Makes the schedule.
        default_stages_per_rank: Used when the user gives none.
        has_fixed_stages: Whether it allows no other number of them than the default.
        summary: One line for people who choose.
        is_search: Whether it searches, and so takes long and depends on the costs.
    """

    name: str
    build: Callable[[ScheduleRequest], Schedule]
    summary: str
    default_stages_per_rank: int = 1
    has_fixed_stages: bool = False
    is_search: bool = False

    def allows(self, stages_per_rank: int) -> bool:
        """True when the family can place so many stages on a rank."""
        return stages_per_rank == self.default_stages_per_rank if self.has_fixed_stages else stages_per_rank >= 1

    def check_stages_per_rank(self, stages_per_rank: int) -> None:
        """Raise ScheduleError, saying what is allowed, unless the family can place so many stages on a rank."""
        if self.allows(stages_per_rank):
            return
        allowed = f"exactly {self.default_stages_per_rank}" if self.has_fixed_stages else "1 or more"
        raise ScheduleError(f"stages_per_rank is {stages_per_rank}, but {self.name} allows {allowed} ({self.summary})")


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Make ``family`` known to :func:`build_schedule`."""
    _FAMILIES[family.name] = family
    return family


def available_schedules() -> tuple[str, ...]:
    """The names that :func:`build_schedule` knows."""
    return tuple(_FAMILIES)


def schedule_family(name: str) -> Family:
    """The family of that name.

    Raises:
        ScheduleError: There is none; the message lists all.
    """
    if name not in _FAMILIES:
        raise ScheduleError(f"unknown schedule {name!r}: choose one of {', '.join(_FAMILIES)}, or a .csv file")
    return _FAMILIES[name]


def families_allowing(stages_per_rank: int) -> list[Family]:
    """The families that can place so many stages on a rank; an interleaved one of one stage is another one again."""
    return [
        family
        for family in _FAMILIES.values()
        if family.allows(stages_per_rank) and family.default_stages_per_rank <= stages_per_rank
    ]


def is_schedule_file(name: str | PathLike[str]) -> bool:
    """Whether ``name`` is the path of a CSV file, not the name of a family."""
    return str(name).endswith(".csv")


def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    costs: StageCosts | None = None,
    memory_limit: float | Sequence[float] | None = None,
    placement: Placement | None = None,
    quick: bool = False,
    sharding: Sharding | None = None,
    whole_batch_loss: bool = False,
    search_seconds: float | None = None,
) -> Schedule:
    """Make the schedule ``name``, or read it if the name ends with ``.csv``.

    Args:
        name: One of :func:`available_schedules`, or the path of a CSV file (see :meth:`Schedule.from_csv`).
        num_ranks: Number of ranks of the pipeline.
        num_microbatches: Number of microbatches of a step, at least 1.
        stages_per_rank: Number of stages on each rank; by default what is usual for the family.
        costs: Costs per stage, for the families that look at them, and the memory that a microbatch holds;
            by default 1 ms for F, I and W.
        memory_limit: The most a rank may hold, in the unit of ``costs.held_*``: a number for all ranks or one per
            rank; None for no limit.
        placement: Where the stages have to be, as in a model that is cut already; ``auto`` keeps to it, and what
            places them otherwise is refused. By default the family chooses.
        quick: With ``auto``, leave out the improvement that most of the search's time goes into.
        sharding: With ``auto``, compare candidates with the gathers and reductions that
            :func:`~lightning_pp.schedule.sharding.insert_sharding` would give them, at ``costs.gather`` and
            ``costs.reduce``. The schedule comes without these actions.
        whole_batch_loss: The loss needs the whole batch: each rank runs its F first, then its I, W and B, see
            :meth:`Schedule.with_whole_batch_loss`. Every schedule then holds all microbatches at once.
        search_seconds: With ``auto``, try no further than so many seconds of wall time, and take the best until then;
            what is found depends on the machine. The hand-made schedules are always built and compared, which is not
            counted; nothing is begun that the time left does not allow at 4 µs an action.

    Raises:
        ScheduleError: The name is unknown, a size cannot work, the file does not fit the sizes, or the schedule needs
            more memory than the limit.
    """
    _check_sizes(num_ranks, num_microbatches)
    costs = costs or UNIT_COSTS
    limits = limit_of_each_rank(memory_limit, num_ranks)
    if is_schedule_file(name):
        schedule = _read_file(name, num_ranks, num_microbatches, stages_per_rank, whole_batch_loss=whole_batch_loss)
    else:
        family = schedule_family(name)
        stages = stages_per_rank if stages_per_rank is not None else _default_stages(family, num_ranks, costs)
        sizes = num_ranks, num_microbatches, stages
        request = ScheduleRequest(*sizes, costs, limits, placement, quick, sharding, whole_batch_loss, search_seconds)
        schedule = _build_family(family, request)
    _check_placement(schedule, placement, name)
    if limits is not None:
        _check_limit(schedule, costs, limits)
    return schedule


def _check_sizes(num_ranks: int, num_microbatches: int) -> None:
    if num_ranks < 1:
        raise ScheduleError(f"num_ranks is {num_ranks}: a pipeline has at least 1 rank")
    if num_microbatches < 1:
        raise ScheduleError(f"num_microbatches is {num_microbatches}: a step has at least 1 microbatch")


def _read_file(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None, *, whole_batch_loss: bool
) -> Schedule:
    """The schedule of a CSV file, in the order that ``whole_batch_loss`` needs."""
    num_stages = None if stages_per_rank is None else num_ranks * stages_per_rank
    schedule = Schedule.from_csv(name, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches)
    return schedule.with_whole_batch_loss() if whole_batch_loss else schedule


def _build_family(family: Family, request: ScheduleRequest) -> Schedule:
    """The schedule of a family, in the order that ``whole_batch_loss`` needs."""
    family.check_stages_per_rank(request.stages_per_rank)
    request.costs.per_stage(request.num_ranks * request.stages_per_rank)
    schedule = family.build(request)
    return merge_first_stage(schedule.with_whole_batch_loss() if request.whole_batch_loss else schedule)


def _check_placement(schedule: Schedule, placement: Placement | None, name: str) -> None:
    if placement not in (None, schedule.placement):
        raise ScheduleError(
            f"{name} puts the stages on ranks {list(schedule.placement.rank_of_stage)}, but the pipeline needs them "
            f"on ranks {list(placement.rank_of_stage)}. Choose a schedule with that placement ({placement.kind})"
        )


def _default_stages(family: Family, num_ranks: int, costs: StageCosts) -> int:
    """As many stages a rank as the costs are for, if they say; else what is usual for the family."""
    num_stages = costs.num_stages
    if num_stages is not None and num_stages % num_ranks == 0:
        return num_stages // num_ranks
    return family.default_stages_per_rank


def _check_limit(schedule: Schedule, costs: StageCosts, limits: Sequence[float]) -> None:
    peaks = peaks_of(schedule, costs)
    over = [rank for rank, (peak, limit) in enumerate(zip(peaks, limits, strict=True)) if exceeds(peak, limit)]
    if over and schedule.whole_batch_loss:
        raise ScheduleError(
            f"{schedule.name} holds {peaks[over[0]]:g} on rank {over[0]}, but the memory limit is "
            f"{limits[over[0]]:g}. With whole_batch_loss every schedule holds all {schedule.num_microbatches} "
            f"microbatches of a batch at once. The smallest limit that works is {max(peaks):g}. {HELPS_WHOLE_BATCH}"
        )
    if over:
        rank = over[0]
        raise ScheduleError(
            f"{schedule.name} holds {peaks[rank]:g} on rank {rank}, but the memory limit is {limits[rank]:g}. The "
            f"smallest limit that works for it is {max(peaks):g}. Raise the limit, use smaller microbatches, or "
            "choose a schedule that holds less"
        )
