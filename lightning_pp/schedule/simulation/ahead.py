"""Which forwards of a step ranks come to while others are still in the step before."""

from __future__ import annotations

from lightning_pp.schedule.program.action import ActionKind
from lightning_pp.schedule.program.program import Programs
from lightning_pp.schedule.simulation.costs import UNIT_COSTS
from lightning_pp.schedule.simulation.simulate import simulate


def forwards_ahead(schedule: Programs) -> tuple[int, ...]:
    """For each rank, with how many forwards it may begin a step before the step before has ended on all ranks.

    They are the first actions of its program, as far as they are F, none of the last stage, and need nothing but each
    other. Counted are those that begin no later than the step before ends where F, I and W all take one unit of time,
    messages none, and a rank begins a step when it is done with the one before. So what one of them sends is received
    by one of them, or by an action after them.
    """
    ends_ms = [ends[-1] if len(ends) else 0.0 for ends in simulate(schedule, UNIT_COSTS).end_ms]
    all_ended = max(ends_ms, default=0.0)
    last_stage = schedule.placement.num_stages - 1
    counts = [0] * len(schedule.programs)
    done: dict[tuple[int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule.programs):
            while counts[rank] < len(program):
                action = program[counts[rank]]
                if action.kind is not ActionKind.F or action.microbatch is None or action.stage == last_stage:
                    break
                needed = done.get((action.stage - 1, action.microbatch), 0.0 if action.stage == 0 else None)
                if needed is None or (begin := max(ends_ms[rank], needed)) > all_ended:
                    break
                ends_ms[rank] = done[action.stage, action.microbatch] = begin + 1.0
                counts[rank] += 1
                moved = True
    return tuple(counts)
