"""What a rank holds while it runs its program.

Memory follows from the order alone: F adds ``held_after_forward``, I turns it into ``held_after_input``, W and B free
it. OFFLOAD frees ``held_on_host`` of it, which RELOAD takes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightning_pp.schedule.program.action import Action
from lightning_pp.schedule.program.coded import CodedProgram
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.simulation.costs import StageCosts

if TYPE_CHECKING:
    from lightning_pp.schedule.schedule import Schedule

TOLERANCE = 1e-9
"""Relative slack when comparing sums of floats with a limit."""


def held_change(costs: StageCosts, num_stages: int) -> npt.NDArray[np.float64]:
    """What an action adds to what its rank holds, by row, in the unit of ``costs.held_*``."""
    resolved = costs.per_stage(num_stages)
    after_forward, after_input = np.array(resolved.held_after_forward), np.array(resolved.held_after_input)
    of_compute = (after_forward, after_input - after_forward, -after_input, -after_forward)
    on_host, of_sharding = np.array(resolved.held_on_host), np.zeros(3 * num_stages)
    return np.concatenate((*of_compute, -on_host, on_host, of_sharding))


def held_after_each(program: Sequence[Action], costs: StageCosts, num_stages: int) -> npt.NDArray[np.float64]:
    """What the rank holds after each action of ``program``, in the unit of ``costs.held_*``."""
    if not isinstance(program, CodedProgram):
        most = max((action.microbatch or 0 for action in program), default=0)
        program = CodedProgram.of(program, num_stages, most + 1)
    return np.cumsum(held_change(costs, num_stages)[program.codes // program.num_microbatches])


def peak_memory(program: Sequence[Action], costs: StageCosts, num_stages: int) -> float:
    """The most that the rank holds at any time."""
    return float(held_after_each(program, costs, num_stages).max(initial=0.0))


def peaks_of(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """For each rank of ``schedule``, the most that it holds at any time."""
    priced = schedule.priced(costs)
    return tuple(peak_memory(program, priced, schedule.placement.num_stages) for program in schedule.programs)


def held_by_ranks(costs: StageCosts, placement: Placement, num_microbatches: int) -> tuple[float, ...]:
    """What each rank holds after F of so many microbatches on all its stages, in the unit of ``costs.held_*``."""
    held = costs.per_stage(placement.num_stages).held_after_forward
    stages_of_ranks = map(placement.stages_of_rank, range(placement.num_ranks))
    return tuple(num_microbatches * sum(held[stage] for stage in stages) for stages in stages_of_ranks)


def exceeds(held: float, limit: float) -> bool:
    """True when ``held`` is above ``limit`` by more than the rounding of sums of floats."""
    return held > limit + TOLERANCE * max(1.0, abs(limit))
