"""From a schedule's name to programs for the sizes at hand."""

from __future__ import annotations

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Placement, Schedule, available_schedules, build_forward_only, build_schedule
from lightning_pp.schedule.registry import schedule_family

# made for one number of microbatches and given costs; training needs programs for every number that a batch gives
_NOT_TRAINABLE = ("auto",)


def check_schedule_name(name: str, stages_per_rank: int | None) -> None:
    """Raises :class:`ScheduleError` unless the strategy can train with the schedule and so many stages on a rank."""
    trainable = [known for known in available_schedules() if known not in _NOT_TRAINABLE]
    if name in _NOT_TRAINABLE or name.endswith(".csv"):
        raise ScheduleError(
            f"schedule={name!r} can be built and simulated with lightning_pp.schedule.build_schedule, but the strategy "
            f"does not train with it yet: choose one of {', '.join(trainable)}"
        )
    family = schedule_family(name)
    if stages_per_rank is not None:
        family.check_stages_per_rank(stages_per_rank)


def placement_for(name: str, num_ranks: int, stages_per_rank: int | None) -> Placement:
    """Which rank holds which stages under the schedule ``name``."""
    return build_schedule(name, num_ranks=num_ranks, num_microbatches=1, stages_per_rank=stages_per_rank).placement


class ProgramBook:
    """Programs by number of microbatches, made when first needed.

    Args:
        name: Name of the schedule.
        placement: Which rank holds which stages.
    """

    def __init__(self, name: str, placement: Placement) -> None:
        self._name = name
        self._placement = placement
        self._training: dict[int, Schedule] = {}
        self._evaluation: dict[int, Schedule] = {}

    def training(self, num_microbatches: int) -> Schedule:
        """Forward and backward of a batch of ``num_microbatches``."""
        if num_microbatches not in self._training:
            schedule = build_schedule(
                self._name,
                num_ranks=self._placement.num_ranks,
                num_microbatches=num_microbatches,
                stages_per_rank=self._placement.num_stages // self._placement.num_ranks,
            ).validate()
            assert schedule.placement == self._placement  # a family places stages alike for any number of microbatches
            self._training[num_microbatches] = schedule
        return self._training[num_microbatches]

    def evaluation(self, num_microbatches: int) -> Schedule:
        """Forward only."""
        if num_microbatches not in self._evaluation:
            self._evaluation[num_microbatches] = build_forward_only(self._placement, num_microbatches)
        return self._evaluation[num_microbatches]
