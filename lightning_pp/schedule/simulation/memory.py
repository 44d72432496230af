"""What a rank holds while it runs its program.

Memory follows from the order alone: F adds ``held_after_forward``, I turns it into ``held_after_input``, W and B free
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.coded import CodedProgram
from lightning_pp.schedule.program.program import Programs
from lightning_pp.schedule.simulation.costs import StageCosts

TOLERANCE = 1e-9
"""Relative slack when comparing sums of floats with a limit."""


def held_after_each(program: Sequence[Action], costs: StageCosts, num_stages: int) -> Iterator[float]:
    """What the rank holds after each action of ``program``, in the unit of ``costs.held_*``."""
    resolved = costs.per_stage(num_stages)
    after_forward, after_input = resolved.held_after_forward, resolved.held_after_input
    delta = {
        ActionKind.F: after_forward,
        ActionKind.I: tuple(late - early for early, late in zip(after_forward, after_input, strict=True)),
        ActionKind.W: tuple(-late for late in after_input),
        ActionKind.B: tuple(-early for early in after_forward),
    }
    held = 0.0
    for action in program:
        if action.kind in delta:
            held += delta[action.kind][action.stage]
        yield held


def peak_memory(program: Sequence[Action], costs: StageCosts, num_stages: int) -> float:
    """The most that the rank holds at any time."""
    if isinstance(program, CodedProgram) and len(program):
        resolved = costs.per_stage(num_stages)
        after_forward, after_input = np.array(resolved.held_after_forward), np.array(resolved.held_after_input)
        of_row = np.concatenate((after_forward, after_input - after_forward, -after_input, -after_forward))
        return float(np.cumsum(of_row[program.codes // program.num_microbatches]).max())
    return max(held_after_each(program, costs, num_stages), default=0.0)


def peaks_of(schedule: Programs, costs: StageCosts) -> tuple[float, ...]:
    """For each rank of ``schedule``, the most that it holds at any time."""
    return tuple(peak_memory(program, costs, schedule.placement.num_stages) for program in schedule.programs)


def exceeds(held: float, limit: float) -> bool:
    """True when ``held`` is above ``limit`` by more than the rounding of sums of floats."""
    return held > limit + TOLERANCE * max(1.0, abs(limit))
