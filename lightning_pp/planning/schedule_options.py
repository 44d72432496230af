"""What the user asks of the schedule, checked as far as it can be without devices and without the model."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_pp.errors import ConfigurationError, ScheduleError
from lightning_pp.schedule import Schedule, StageCosts
from lightning_pp.schedule.registry import schedule_family
from lightning_pp.schedule.simulation.costs_file import GIB, read_costs_file

DEFAULT_NUM_PROFILED_BATCHES = 8


@dataclass(frozen=True)
class ScheduleOptions:
    """The strategy's arguments that concern the schedule.

    Attributes:
        name: Name of a schedule, or the path of a CSV file.
        stages_per_rank: Stages on each rank, or None.
        memory_limit_gib: What a rank may hold of microbatches between their F and W, or None.
        exact_search: Let the exact solver finish the search of ``auto``.
        num_profiled_batches: Batches to measure before ``auto`` searches.
        save_costs: Where measured costs are written, or None.
        from_file: The schedule that was read from a CSV file, or None.
        costs: Given costs, or None.
        costs_hold_gib: Whether their ``held_*`` are GiB; otherwise the bytes of the dry run count.
        costs_origin: Where they come from, for messages.
        costs_measured_on: What their file says of it.
        whole_batch_loss: The code after the last unit runs once, on the outputs of all microbatches joined; every rank
            runs its forwards first. ``from_file`` is in that order then.
        is_reordered: Whether ``from_file`` had to be put in that order.
    """

    name: str
    stages_per_rank: int | None = None
    memory_limit_gib: float | None = None
    exact_search: bool = False
    num_profiled_batches: int = DEFAULT_NUM_PROFILED_BATCHES
    save_costs: Path | None = None
    from_file: Schedule | None = None
    costs: StageCosts | None = None
    costs_hold_gib: bool = False
    costs_origin: str = ""
    costs_measured_on: Mapping[str, Any] = field(default_factory=dict)
    whole_batch_loss: bool = False
    is_reordered: bool = False

    @property
    def searches(self) -> bool:
        """Whether the schedule is searched for."""
        return self.name == "auto"

    @property
    def measures(self) -> bool:
        """Whether the first batches are measured."""
        return (self.searches and self.costs is None) or self.save_costs is not None

    @classmethod
    def checked(
        cls,
        schedule: str | PathLike[str],
        *,
        stages_per_rank: int | None,
        num_microbatches: int | str,
        pipeline_parallel_size: int | str,
        costs: StageCosts | str | PathLike[str] | None,
        memory_limit_gib: float | None,
        exact_search: bool,
        num_profiled_batches: int,
        save_costs: str | PathLike[str] | None,
        whole_batch_loss: bool = False,
    ) -> ScheduleOptions:
        """Reads the files and checks everything against everything else.

        Raises:
            ScheduleError: The schedule is unknown, a file is not right, or ``stages_per_rank`` is not allowed.
            ConfigurationError: Two arguments do not go together, or a number is out of range.
        """
        name = str(schedule)
        from_file, is_reordered = None, False
        if name.endswith(".csv"):
            from_file = written = _read(name, stages_per_rank, num_microbatches, pipeline_parallel_size)
            if whole_batch_loss:
                from_file = written.with_whole_batch_loss()
                is_reordered = from_file.programs != written.programs
        elif stages_per_rank is not None:
            schedule_family(name).check_stages_per_rank(stages_per_rank)
        else:
            schedule_family(name)
        _check_values(memory_limit_gib, num_profiled_batches, whole_batch_loss)
        if exact_search and name != "auto":
            raise ConfigurationError(f"exact_search=True is for schedule='auto'; the schedule is {name!r}.")
        if exact_search and importlib.util.find_spec("ortools") is None:
            raise ConfigurationError("exact_search=True needs OR-tools: pip install 'lightning-pp[exact]'.")
        return cls(
            name,
            stages_per_rank,
            memory_limit_gib,
            exact_search,
            num_profiled_batches,
            None if save_costs is None else Path(save_costs),
            from_file,
            whole_batch_loss=whole_batch_loss,
            is_reordered=is_reordered,
            **_given(costs),
        )

    def whole_batch_text(self, schedule: Schedule) -> str:
        """What ``whole_batch_loss`` does to ``schedule``, for the log."""
        reordered = " The file has another order; its actions were put in this one." if self.is_reordered else ""
        return (
            f"whole_batch_loss=True: {schedule.name} runs all forwards of a batch before its backwards, and holds all "
            f"{schedule.num_microbatches} microbatches at once.{reordered}"
        )

    def num_microbatches(self, asked: int | Any) -> int | Any:
        """``asked``, or what the file has where ``"auto"`` is asked."""
        return self.from_file.num_microbatches if asked == "auto" and self.from_file is not None else asked

    def check_num_ranks(self, num_ranks: int) -> None:
        """Raises :class:`ConfigurationError` unless the schedule or the costs can be for so many ranks."""
        if self.from_file is not None and self.from_file.placement.num_ranks != num_ranks:
            raise ConfigurationError(
                f"schedule={self.name!r} has rows for {self.from_file.placement.num_ranks} ranks, and the pipeline has "
                f"{num_ranks}: set pipeline_parallel_size={self.from_file.placement.num_ranks}, or write a row a rank."
            )
        num_stages = None if self.costs is None else self.costs.num_stages
        if num_stages is None or isinstance(self.costs_measured_on.get("stages"), list):
            return  # one number for all, or known by unit, so that other stages can be made of them
        if self.from_file is not None:
            wanted: int | None = self.from_file.placement.num_stages
        else:
            wanted = None if self.stages_per_rank is None else self.stages_per_rank * num_ranks
        if num_stages % num_ranks if wanted is None else num_stages != wanted:
            raise ConfigurationError(
                f"{self.costs_origin} are for {num_stages} stages, and {num_ranks} ranks have "
                f"{f'a multiple of {num_ranks}' if wanted is None else wanted} of them: give costs that were measured "
                "with as many stages, or leave costs out and they are measured."
            )


def _check_values(memory_limit_gib: float | None, num_profiled_batches: int, whole_batch_loss: bool) -> None:
    """Each by itself."""
    if memory_limit_gib is not None and not (math.isfinite(memory_limit_gib) and memory_limit_gib > 0):
        raise ConfigurationError(
            f"memory_limit_gib={memory_limit_gib!r} must be a number above 0, or None for no limit."
        )
    if isinstance(num_profiled_batches, bool) or num_profiled_batches < 1:
        raise ConfigurationError(f"num_profiled_batches={num_profiled_batches!r} must be an integer of at least 1.")
    if not isinstance(whole_batch_loss, bool):
        raise ConfigurationError(f"whole_batch_loss={whole_batch_loss!r} must be True or False.")


def _read(name: str, stages_per_rank: int | None, num_microbatches: int | str, num_ranks: int | str) -> Schedule:
    """The schedule in the file, compared with the other arguments."""
    schedule = Schedule.from_csv(name)
    placement, number = schedule.placement, schedule.num_microbatches
    if schedule.forward_only:
        raise ScheduleError(f"{name} has no backward: a schedule to train with has I and W, or B, for every F")
    if isinstance(num_ranks, int) and num_ranks != placement.num_ranks:
        ScheduleOptions(name, from_file=schedule).check_num_ranks(num_ranks)
    if stages_per_rank is not None and stages_per_rank * placement.num_ranks != placement.num_stages:
        raise ConfigurationError(
            f"stages_per_rank={stages_per_rank}, but {name} has {placement.num_stages} stages on "
            f"{placement.num_ranks} ranks: leave stages_per_rank out, the file says where the stages are."
        )
    if isinstance(num_microbatches, int) and num_microbatches > number:
        raise ConfigurationError(
            f"num_microbatches={num_microbatches}, but {name} is for {number} microbatches: set "
            f"num_microbatches={number} (or 'auto', which takes the file's), or write a schedule for "
            f"{num_microbatches}."
        )
    return schedule


def _given(costs: StageCosts | str | PathLike[str] | None) -> dict[str, Any]:
    """The fields of :class:`ScheduleOptions` that say what was given as ``costs``."""
    if costs is None:
        return {}
    if isinstance(costs, StageCosts):
        has_held = any(value != 1.0 for value in (costs.held_after_forward, costs.held_after_input))
        return {"costs": costs, "costs_hold_gib": has_held, "costs_origin": "the given costs"}
    if not isinstance(costs, (str, PathLike)):
        raise ConfigurationError(
            f"costs={costs!r} must be StageCosts, the path of a file that StageCosts.to_json or save_costs wrote, or "
            "None."
        )
    content = read_costs_file(costs)
    return {
        "costs": StageCosts.from_json(costs),
        "costs_hold_gib": content.held_unit == GIB,
        "costs_origin": f"the costs in {costs}",
        "costs_measured_on": content.measured_on,
    }
