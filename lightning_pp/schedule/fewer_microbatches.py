"""A schedule for fewer microbatches, made from one for more."""

from __future__ import annotations

from dataclasses import replace

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.schedule import Schedule


def keep_first_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """``schedule`` without the actions of all microbatches from ``num_microbatches`` on.

    What is left is legal: every action still stands after what it needs, in the one order of all ranks that proves the
    absence of deadlock, and no rank holds more than before at any time. Sharding actions stay.

    Args:
        schedule: For at least ``num_microbatches``.
        num_microbatches: How many to keep, at least 1.

    Raises:
        ScheduleError: The schedule has fewer, or ``num_microbatches`` is less than 1.
    """
    if not 1 <= num_microbatches <= schedule.num_microbatches:
        raise ScheduleError(
            f"{schedule.name} has {schedule.num_microbatches} microbatches, so {num_microbatches} of them cannot be "
            f"kept: give 1 to {schedule.num_microbatches}"
        )
    if num_microbatches == schedule.num_microbatches:
        return schedule
    programs = tuple(
        tuple(action for action in program if action.microbatch is None or action.microbatch < num_microbatches)
        for program in schedule.programs
    )
    return replace(schedule, num_microbatches=num_microbatches, programs=programs)
