"""One action after the other, as slow and as plain as can be: what the simulator and the checks are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product

from lightning_pp.schedule import Schedule, StageCosts
from lightning_pp.schedule.program.action import Action, ActionKind

F, I, W, B = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B  # noqa: E741
UNSHARD, REDUCE = ActionKind.UNSHARD, ActionKind.REDUCE

Times = list[list[float]]


def needed_by(action: Action, schedule: Schedule) -> Iterator[tuple[int, ActionKind, int | None]]:
    """What has to have ended before: stage, kind (I for I and B), microbatch."""
    last = schedule.placement.num_stages - 1
    if action.kind is F and action.stage:
        yield action.stage - 1, F, action.microbatch
    elif action.kind is W:
        yield action.stage, I, action.microbatch
    elif action.kind in (I, B):
        yield action.stage, F, action.microbatch
        if action.stage < last:
            yield action.stage + 1, I, action.microbatch
        elif schedule.whole_batch_loss:
            yield from ((last, F, microbatch) for microbatch in range(schedule.num_microbatches))


def run(
    schedule: Schedule, costs: StageCosts, begin_ms: Sequence[float] | None = None
) -> tuple[Times, Times, list[float]]:
    """Starts and ends by rank, as far as the ranks get, and when all has ended that each does."""
    placement = schedule.placement
    each = costs.per_stage(placement.num_stages)
    duration = {F: each.forward, I: each.backward_input, W: each.backward_weight}
    duration[B] = tuple(map(sum, zip(each.backward_input, each.backward_weight, strict=True)))
    ranks = range(placement.num_ranks)
    clock = list(begin_ms or [0.0 for _ in ranks])
    gathered, collectives = dict.fromkeys(range(placement.num_stages), 0.0), [0.0 for _ in ranks]
    for rank, program in enumerate(schedule.programs):
        if all(action.kind is not UNSHARD for action in program) and any(each.gather):
            now = clock[rank]
            for stage in dict.fromkeys(action.stage for action in program):
                now = gathered[stage] = now + each.gather[stage]
            collectives[rank] = now
    done: dict[tuple[int, ActionKind, int | None], float] = {}
    starts: Times = [[] for _ in ranks]
    ends: Times = [[] for _ in ranks]

    def take_next(rank: int) -> bool:
        if len(starts[rank]) == len(schedule.programs[rank]):
            return False
        action = schedule.programs[rank][len(starts[rank])]
        needed = list(needed_by(action, schedule))
        if any(other not in done for other in needed):
            return False
        begin = clock[rank]
        if action.kind in (UNSHARD, REDUCE):
            begin = max(begin, collectives[rank])
            of_kind = each.gather if action.kind is UNSHARD else each.reduce
            collectives[rank] = end = begin + of_kind[action.stage]
            if action.kind is UNSHARD:
                gathered[action.stage] = end
        elif action.kind not in duration:
            end = begin
        else:
            for stage, kind, microbatch in needed:
                sent = placement.rank_of_stage[stage] != rank
                p2p = (each.p2p if kind is F else each.p2p_back)[stage] if sent else 0.0
                begin = max(begin, done[stage, kind, microbatch] + p2p)
            begin = max(begin, gathered[action.stage])
            clock[rank] = end = begin + duration[action.kind][action.stage]
            done[action.stage, I if action.kind is B else action.kind, action.microbatch] = end
        starts[rank].append(begin)
        ends[rank].append(end)
        return True

    while any(take_next(rank) for rank in ranks):
        pass
    ended = [max([clock[rank], *ends[rank]]) for rank in ranks]
    for rank, program in enumerate(schedule.programs):
        if all(action.kind is not REDUCE for action in program) and any(each.reduce):
            last = {a.stage: end for a, end in zip(program, ends[rank], strict=False) if a.kind in (W, B)}
            now = 0.0
            for stage in sorted(last, key=lambda stage: last[stage]):
                now = max(now, last[stage]) + each.reduce[stage]
            ended[rank] = max(ended[rank], now)
    return starts, ends, ended


def held_after_each(schedule: Schedule, rank: int, costs: StageCosts) -> list[float]:
    """What the rank holds after each action."""
    each = costs.per_stage(schedule.placement.num_stages)

    def change(action: Action) -> float:
        after_forward, after_input = each.held_after_forward[action.stage], each.held_after_input[action.stage]
        return {F: after_forward, I: after_input - after_forward, W: -after_input, B: -after_forward}[action.kind]

    return list(accumulate(map(change, schedule.programs[rank])))


def keeps_rules(schedule: Schedule, costs: StageCosts, limits: Sequence[float] | None) -> bool:
    """Whether a schedule without sharding actions can be trained with."""
    placement = schedule.placement
    for rank, program in enumerate(schedule.programs):
        found = sorted((action.stage, action.kind.value, action.microbatch or 0) for action in program)
        expected = []
        for stage, microbatch in product(placement.stages_of_rank(rank), range(schedule.num_microbatches)):
            is_whole = Action(stage, B, microbatch) in set(program)
            expected += [(stage, kind, microbatch) for kind in (("B", "F") if is_whole else ("F", "I", "W"))]
        if found != sorted(expected):
            return False
    starts, _, _ = run(schedule, costs)
    if any(len(times) < len(program) for times, program in zip(starts, schedule.programs, strict=True)):
        return False
    peaks = [max(held_after_each(schedule, rank, costs)) for rank in range(placement.num_ranks)]
    return limits is None or all(peak <= limit + 1e-6 for peak, limit in zip(peaks, limits, strict=True))
