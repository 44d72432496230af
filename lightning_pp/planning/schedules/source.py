"""The source of programs: ``schedule=`` is read once, and then asked for programs.

``schedule=`` names a family of schedules (:class:`Named`), a CSV file (:class:`FromFile`) or the search
(:class:`Searched`). :func:`schedule_source` tells them apart, and nobody else does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lightning_pp.distributed.sizes import Auto
from lightning_pp.errors import ConfigurationError, ScheduleError
from lightning_pp.planning.schedules.predictions import step_time
from lightning_pp.schedule import Placement, Schedule, Sharding, StageCosts, build_schedule
from lightning_pp.schedule.fewer_microbatches import keep_first_microbatches
from lightning_pp.schedule.offloading import with_offloading
from lightning_pp.schedule.program.whole_batch import whole_backwards
from lightning_pp.schedule.registry import Family, is_schedule_file, schedule_family
from lightning_pp.schedule.simulation.memory import held_by_ranks

_STAGES_PER_RANK_TRIED = (1, 2)
_LIMITS_TRIED = (4.0, 2.0, 1.0)


class _Request(NamedTuple):
    """What :meth:`ScheduleSource.program` is asked."""

    placement: Placement
    num_microbatches: int
    costs: StageCosts | None
    memory_limit: float | Sequence[float] | None
    quick: bool
    sharding: Sharding | None
    on_every_rank: bool

    def sizes_and_limits(self) -> dict[str, Any]:
        """The arguments of :func:`build_schedule` that say for what it is to be."""
        num_ranks, num_stages = self.placement.num_ranks, self.placement.num_stages
        return {
            "num_ranks": num_ranks,
            "num_microbatches": self.num_microbatches,
            "stages_per_rank": num_stages // num_ranks,
            "costs": self.costs,
            "memory_limit": self.memory_limit,
            "placement": self.placement,
        }


@dataclass(frozen=True)
class ScheduleSource(ABC):
    """Makes programs for any number of microbatches, and says which placements are possible.

    Attributes:
        name: What the user writes.
        stages_per_rank: Stages on each rank that the user asks for, or None.
        whole_batch_loss: Whether the code after the last unit runs once, on the outputs of all microbatches joined;
            every rank runs its forwards first then.
    """

    name: str
    stages_per_rank: int | None = None
    whole_batch_loss: bool = False
    is_searched: ClassVar[bool] = False
    """Whether the order is searched for, by the costs of stages; then measured costs are worth another search."""

    def __post_init__(self) -> None:
        if not isinstance(self.whole_batch_loss, bool):
            raise ConfigurationError(f"whole_batch_loss={self.whole_batch_loss!r} must be True or False.")

    @property
    def is_reordered(self) -> bool:
        """Whether a file had to be put in another order for ``whole_batch_loss``."""
        return False

    def with_stages_per_rank(self, stages_per_rank: int | None) -> ScheduleSource:
        """With so many stages on each rank, or as it is if it cannot have so many."""
        return self

    def check_sizes(  # noqa: B027 - most have programs for all sizes
        self, num_ranks: int | Auto, num_microbatches: int | Auto = "auto"
    ) -> None:
        """Raises :class:`ConfigurationError` unless there are programs for such sizes."""

    def num_microbatches(self, asked: int | Auto) -> int | Auto:
        """``asked``, or what a file has where ``"auto"`` is asked."""
        return asked

    def num_stages(self, num_ranks: int) -> int | None:
        """Stages that a pipeline of ``num_ranks`` must have; None if that is left open."""
        return None if self.stages_per_rank is None else self.stages_per_rank * num_ranks

    @abstractmethod
    def placements(self, num_ranks: int, stages_per_rank: int | None = None) -> list[Placement]:
        """Where the stages may be: one placement, or several to choose from.

        Args:
            num_ranks: Ranks of the pipeline.
            stages_per_rank: What a search is to be for, where that is known and the user has not asked.
        """

    def program(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: StageCosts | None = None,
        memory_limit: float | Sequence[float] | None = None,
        *,
        quick: bool = False,
        sharding: Sharding | None = None,
        on_every_rank: bool = False,
    ) -> Schedule:
        """A schedule that is checked and can be run.

        Args:
            placement: Which rank holds which stages.
            num_microbatches: Of the batch.
            costs: Of the stages, for those that look at costs.
            memory_limit: What a rank may hold, one number or one for each rank, in the unit of ``costs.held_*``.
            quick: Whether a search leaves out what takes long.
            sharding: What a search is to compare schedules with; None: nothing is gathered.
            on_every_rank: Whether every rank asks for itself and has to get the same; no time bounds a search then.

        Raises:
            ScheduleError: There is none for so many microbatches, or none keeps the limit.
        """
        request = _Request(placement, num_microbatches, costs, memory_limit, quick, sharding, on_every_rank)
        if costs is None or not any(costs.per_stage(placement.num_stages).held_on_host):
            return self._program(request)
        return self._offloaded(request, costs)

    def _offloaded(self, request: _Request, costs: StageCosts) -> Schedule:
        """:meth:`program` where activations may wait on the host: the limit is kept with their help."""
        found = with_offloading(self._program(request._replace(memory_limit=None)), costs)
        return found.validate(costs=costs, memory_limit=request.memory_limit)

    @abstractmethod
    def _program(self, request: _Request) -> Schedule:
        """:meth:`program` of one kind of source."""

    def program_to_cut_by(self, placement: Placement, num_microbatches: int) -> Schedule:
        """The schedule whose step cuts are to make short, before the costs of stages are known."""
        return self.program(placement, num_microbatches)

    def orders_to_hold_by(self, placement: Placement, num_microbatches: int) -> tuple[Schedule | None, ...]:
        """The schedules by which cuts may keep a limit of memory, the first of which is tried first.

        None: one that is yet to be searched for, which holds one microbatch at a time if it has to.
        """
        return (self.program_to_cut_by(placement, num_microbatches),)

    def memory_limit(
        self, asked: float | None, costs: StageCosts, placement: Placement, room: Sequence[float] | None = None
    ) -> float | tuple[float, ...] | None:
        """What microbatches may hold on each rank, in the unit of ``costs.held_*``; None for no limit.

        Args:
            asked: What the user allows, or None.
            costs: Of the stages.
            placement: Which rank holds which stages.
            room: What a limit of all memory leaves on each rank. Cuts have seen to it, where nothing is searched.
        """
        return asked


@dataclass(frozen=True)
class Named(ScheduleSource):
    """A family that is built by hand for each number of microbatches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_family(self)

    def with_stages_per_rank(self, stages_per_rank: int | None) -> ScheduleSource:
        """With so many stages on each rank, or as is usual if the family cannot have so many."""
        allowed = stages_per_rank is not None and schedule_family(self.name).allows(stages_per_rank)
        return replace(self, stages_per_rank=stages_per_rank if allowed else None)

    def placements(self, num_ranks: int, stages_per_rank: int | None = None) -> list[Placement]:
        """The family's own."""
        wanted = self.stages_per_rank or schedule_family(self.name).default_stages_per_rank
        return [build_schedule(self.name, num_ranks=num_ranks, num_microbatches=1, stages_per_rank=wanted).placement]

    def program_to_cut_by(self, placement: Placement, num_microbatches: int) -> Schedule:
        """The schedule whose step cuts are to make short; it is built once."""
        return _built_once(self, placement, num_microbatches)

    def _program(self, request: _Request) -> Schedule:
        """Built by name."""
        return build_schedule(
            self.name, whole_batch_loss=self.whole_batch_loss, **request.sizes_and_limits()
        ).validate()


@dataclass(frozen=True)
class FromFile(ScheduleSource):
    """A schedule in a CSV file, which says placement and order.

    Attributes:
        written: As the file has it.
    """

    written: Schedule = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        placement, asked = self.written.placement, self.stages_per_rank
        if self.written.forward_only:
            raise ScheduleError(
                f"{self.name} has no backward. A schedule for training needs I and W, or B, for every F"
            )
        if asked is not None and asked * placement.num_ranks != placement.num_stages:
            raise ConfigurationError(
                f"stages_per_rank={asked}, but {self.name} has {placement.num_stages} stages on {placement.num_ranks} "
                "ranks. Leave stages_per_rank out: the file says where the stages are."
            )

    @property
    def schedule(self) -> Schedule:
        """The schedule of all microbatches of the file, in the order that ``whole_batch_loss`` needs."""
        return self.written.with_whole_batch_loss() if self.whole_batch_loss else self.written

    @property
    def is_reordered(self) -> bool:
        """Whether that is another order than the file's."""
        return self.schedule.programs != self.written.programs

    def check_sizes(self, num_ranks: int | Auto, num_microbatches: int | Auto = "auto") -> None:
        """Raises :class:`ConfigurationError` unless the file has as many ranks, and enough microbatches."""
        rows, number = self.written.placement.num_ranks, self.written.num_microbatches
        if num_ranks not in ("auto", rows):
            raise ConfigurationError(
                f"schedule={self.name!r} has rows for {rows} ranks, but the pipeline has {num_ranks}. Set "
                f"pipeline_parallel_size={rows}, or write one row per rank."
            )
        if num_microbatches != "auto" and num_microbatches > number:
            raise ConfigurationError(
                f"num_microbatches={num_microbatches}, but {self.name} is for {number} microbatches. Set "
                f"num_microbatches={number} (or 'auto', to take the file's number), or write a schedule for "
                f"{num_microbatches}."
            )

    def num_microbatches(self, asked: int | Auto) -> int | Auto:
        """``asked``, or those of the file."""
        return self.written.num_microbatches if asked == "auto" else asked

    def num_stages(self, num_ranks: int) -> int | None:
        """Those of the file."""
        return self.written.placement.num_stages

    def placements(self, num_ranks: int, stages_per_rank: int | None = None) -> list[Placement]:
        """That of the file."""
        self.check_sizes(num_ranks)
        return [self.written.placement]

    def _program(self, request: _Request) -> Schedule:
        """The file's first microbatches; the limit has to be kept by all that it has."""
        most, num_microbatches = self.written.num_microbatches, request.num_microbatches
        if num_microbatches > most:
            raise ScheduleError(
                f"The batch is cut into {num_microbatches} microbatches, but {self.name} is for {most}. Set "
                f"num_microbatches={most} (or 'auto', to take the file's number), or write a schedule for "
                f"{num_microbatches}."
            )
        all_of_it = self.schedule.validate(costs=request.costs, memory_limit=request.memory_limit)
        return keep_first_microbatches(all_of_it, num_microbatches)


@dataclass(frozen=True)
class Searched(ScheduleSource):
    """A schedule that is searched for, by the costs of the stages and what ranks may hold.

    Attributes:
        search_seconds: How long a search may try, on one rank; None: as long as its effort takes.
    """

    search_seconds: float | None = None
    is_searched: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_family(self)
        seconds = self.search_seconds
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigurationError(
                f"search_seconds={seconds!r} must be a number of at least 0, or None for no bound."
            )

    def with_stages_per_rank(self, stages_per_rank: int | None) -> ScheduleSource:
        """On placements with so many stages on each rank; None: on all."""
        return replace(self, stages_per_rank=stages_per_rank)

    def placements(self, num_ranks: int, stages_per_rank: int | None = None) -> list[Placement]:
        """One chunk, then a V and an interleaved placement of two stages a rank, unless the number is known."""
        wanted = self.stages_per_rank or stages_per_rank
        tried = _STAGES_PER_RANK_TRIED if num_ranks > 1 else (1,)
        found = []
        for number in tried if wanted is None else (wanted,):
            if number == 2 and num_ranks > 1:
                found.append(Placement.v_shaped(num_ranks))
            found.append(Placement.interleaved(num_ranks, number))
        return found

    def _program(self, request: _Request) -> Schedule:
        """What is found on the placement."""
        return build_schedule(
            self.name,
            quick=request.quick,
            search_seconds=None if request.on_every_rank else self.search_seconds,
            sharding=request.sharding,
            whole_batch_loss=self.whole_batch_loss,
            **request.sizes_and_limits(),
        ).validate(costs=request.costs, memory_limit=request.memory_limit)

    def _offloaded(self, request: _Request, costs: StageCosts) -> Schedule:
        """The shorter of two: what is found within the limit, and within the largest multiple that copies bring below.

        Copies lengthen no step, so what is found within the limit is not longer than it would be without them.
        """
        limit = request.memory_limit
        found: list[Schedule] = []
        if limit is None:
            return super()._offloaded(request, costs)
        for factor in _LIMITS_TRIED:
            if found and factor != _LIMITS_TRIED[-1]:
                continue
            limits = np.multiply(np.asarray(limit), factor).tolist()
            try:
                schedule = with_offloading(self._program(request._replace(memory_limit=limits)), costs)
                found.append(schedule.validate(costs=costs, memory_limit=limit))
            except ScheduleError:
                if factor == _LIMITS_TRIED[-1] and not found:
                    raise
        return min(found, key=lambda schedule: step_time(schedule, costs))

    def program_to_cut_by(self, placement: Placement, num_microbatches: int) -> Schedule:
        """One that is made by hand on this placement."""
        usual = {"one chunk": "zb_h1", "V": "zb_v"}.get(placement.kind, "interleaved_zb")
        return Named(usual, whole_batch_loss=self.whole_batch_loss).program_to_cut_by(placement, num_microbatches)

    def orders_to_hold_by(self, placement: Placement, num_microbatches: int) -> tuple[Schedule | None, ...]:
        """One made by hand, else what is searched for; with ``whole_batch_loss`` what holds least: whole backwards."""
        usual = self.program_to_cut_by(placement, num_microbatches)
        if not self.whole_batch_loss:
            return (usual, None)
        return (replace(usual, name=self.name, programs=tuple(map(whole_backwards, usual.programs))),)

    def memory_limit(
        self, asked: float | None, costs: StageCosts, placement: Placement, room: Sequence[float] | None = None
    ) -> float | tuple[float, ...] | None:
        """What the user allows, or else the memory of ``zb_h2``; not more than there is room for.

        ``zb_h2`` holds twice as much as ``1f1b``: on every rank two microbatches of all its stages for each rank of the
        pipeline. More would hardly shorten a step, and hold whole batches; with ``whole_batch_loss`` these are held in
        any case, and there is no limit but the user's.
        """
        if asked is not None and room is None:
            return asked
        if asked is not None:
            limits: tuple[float, ...] = (asked,) * placement.num_ranks
        elif self.whole_batch_loss:
            return None if room is None else tuple(room)
        else:
            limits = held_by_ranks(costs, placement, 2 * placement.num_ranks)
        return limits if room is None else tuple(map(min, limits, room))


def schedule_source(
    schedule: str | PathLike[str],
    stages_per_rank: int | None = None,
    whole_batch_loss: bool = False,
    search_seconds: float | None = None,
) -> ScheduleSource:
    """What ``schedule=`` names; the arguments are the strategy's.

    Raises:
        ScheduleError: There is no such schedule, its file is not right, or it cannot have so many stages a rank.
        ConfigurationError: The arguments do not go together.
    """
    name = str(schedule)
    if is_schedule_file(name):
        source: ScheduleSource = FromFile(name, stages_per_rank, whole_batch_loss, written=Schedule.from_csv(name))
    elif schedule_family(name).is_search:
        return Searched(name, stages_per_rank, whole_batch_loss, search_seconds)
    else:
        source = Named(name, stages_per_rank, whole_batch_loss)
    if search_seconds is not None:
        raise ConfigurationError(f"search_seconds={search_seconds!r} is for schedule='auto'; the schedule is {name!r}.")
    return source


@lru_cache(maxsize=512)  # a search of plans comes back to each with other tensor sizes
def _built_once(source: Named, placement: Placement, num_microbatches: int) -> Schedule:
    """The program of ``source`` before costs are known."""
    return source.program(placement, num_microbatches)


def _check_family(source: ScheduleSource) -> None:
    """Raises :class:`ScheduleError` unless there is such a family, which can have so many stages a rank."""
    family: Family = schedule_family(source.name)
    if source.stages_per_rank is not None:
        family.check_stages_per_rank(source.stages_per_rank)
