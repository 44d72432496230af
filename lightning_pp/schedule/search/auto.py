"""``auto``: the best schedule that can be found for given costs and a memory limit.

Best is the shortest longest span, which is the time of a step in a row of overlapping ones, among schedules whose
makespan is within half a percent of the shortest. Where steps are known to be back to back the makespan does not count,
and best is the shortest time from a step to the next. Candidates are every hand-made schedule and what the greedy
construction makes under many policies, on every placement that the number of stages allows. The best are shortened by
justification and by annealing, in small problems on each placement; not for a step whose loss needs the whole batch,
where moves would have to keep all F first. All effort is counted in simulated actions, so the same request gives the
same schedule on every machine, unless it has a bound in seconds and reaches that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.merging import merge_where_nobody_waits
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.program.whole_batch import HELPS_WHOLE_BATCH
from lightning_pp.schedule.registry import Family, ScheduleRequest, families_allowing, register
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.search.deadline import Deadline
from lightning_pp.schedule.search.greedy import Policy, build_greedy
from lightning_pp.schedule.search.justify import PASSES_OF_A_ROUND, justify
from lightning_pp.schedule.search.local import Climb
from lightning_pp.schedule.search.problem import Orders, Problem
from lightning_pp.schedule.search.timing import Length, Objective, earliest, find_length, lower_bound
from lightning_pp.schedule.sharding import insert_sharding, with_last_split
from lightning_pp.schedule.simulation.memory import exceeds, held_by_ranks, peaks_of
from lightning_pp.schedule.simulation.simulate import step_length

_MAKESPAN_TOLERANCE = 0.005
_SCREENING_ACTIONS = 500_000
"""Effort of trying policies, on few microbatches."""
_BUILDING_ACTIONS = 200_000
"""Effort of building the best of them for all microbatches."""
_JUSTIFYING_ACTIONS = 200_000
_CLIMBING_ACTIONS = 1_200_000
_MAX_CLIMBING_STEPS = 6_000
_MIN_CLIMBING_STEPS = 100
_CLIMBING_STEPS_PER_ACTION = 100
"""Small problems have fewer orders to visit."""
_TEMPERATURES = (0.03, 0.06, 0.1, 0.03, 0.02)
"""Of the climbs of a small problem, each from the end of the last one; hotter ones leave their start."""
_SMALL = 400
"""With up to this many actions, every placement is improved and the climb may go uphill."""
_FEWEST_PASSES = 8
"""Passes over all actions; a search with time for fewer tries nothing."""
_PLANNED_ACTIONS = 2_000_000
"""Gathers are planned for this many actions even after the end of the search."""
_NUM_SIMULATED = 3
"""Candidates that are compared with the hand-made schedules at the end."""


@dataclass(frozen=True)
class _Candidate:
    """Orders with their length and origin."""

    length: Length
    problem: Problem
    orders: Orders
    origin: str


def build_auto(request: ScheduleRequest) -> Schedule:
    """Search; see the module. The name tells the origin: ``auto (zb_v, improved)``.

    Raises:
        ScheduleError: The memory limit is too small for any schedule.
    """
    placements = _placements(request)
    _check_limit(request, placements)
    problems = [_problem(request, placement, request.num_microbatches) for placement in placements]
    deadline = Deadline(request.search_seconds)
    hand_made = list(_hand_made(request))
    candidates: list[_Candidate] = []
    if deadline.allows(_FEWEST_PASSES * problems[0].num_actions):
        candidates += _raw_candidates(problems, hand_made, deadline)
        candidates += _greedy_candidates(request, problems, deadline)
    if not (candidates or hand_made):
        candidates = [_measured(problem, problem.sequential_orders(), "sequential") for problem in problems]
    if candidates and not request.whole_batch_loss and not request.quick and not deadline.has_passed():
        candidates += _improved(candidates, problems, deadline, request)
    # with sharding, what is best depends on gathers, which only the full simulation knows
    if candidates and request.sharding is None:
        objective = _objective(candidate.length.makespan for candidate in candidates)
        candidates = sorted(candidates, key=lambda candidate: objective.of(candidate.length))[:_NUM_SIMULATED]
    found = [candidate.problem.schedule_of(candidate.orders, f"auto ({candidate.origin})") for candidate in candidates]
    found += [replace(schedule, name=f"auto ({schedule.name})") for schedule in hand_made]
    if request.whole_batch_loss:
        found = [schedule.with_whole_batch_loss() for schedule in found]
    return merge_where_nobody_waits(_best(found, request, deadline), request.costs)


def _problem(request: ScheduleRequest, placement: Placement, num_microbatches: int) -> Problem:
    return Problem.build(
        placement,
        num_microbatches,
        request.costs,
        request.memory_limit,
        whole_batch_loss=request.whole_batch_loss,
    )


def _best(schedules: list[Schedule], request: ScheduleRequest, deadline: Deadline) -> Schedule:
    """The best by the full simulation, with gathers and reductions.

    Under ``full_shard`` stages are gathered in windows; once, where these are many to plan and time has run out.
    """
    sharding = request.sharding
    num_actions = sum(len(program) for schedule in schedules for program in schedule.programs)
    has_windows = sharding is not None and sharding.mode == "full_shard"
    has_windows = has_windows and (num_actions <= _PLANNED_ACTIONS or deadline.allows(num_actions))
    lengths = []
    for schedule in schedules:
        sharded = schedule
        if sharding is not None:
            sharded = insert_sharding(schedule, sharding) if has_windows else with_last_split(schedule)
        lengths.append(step_length(sharded, request.costs))
    longest = _objective(makespan for makespan, _ in lengths).longest_makespan
    scores = [(makespan > longest, span) for makespan, span in lengths]
    return schedules[scores.index(min(scores))]


def _objective(makespans: Iterable[float]) -> Objective:
    return Objective((1 + _MAKESPAN_TOLERANCE) * min(makespans))


def _placements(request: ScheduleRequest) -> list[Placement]:
    if request.placement is not None:
        return [request.placement]
    placements = [Placement.interleaved(request.num_ranks, request.stages_per_rank)]
    if request.stages_per_rank == 2 and request.num_ranks > 1:
        placements.insert(0, Placement.v_shaped(request.num_ranks))
    return placements


def _check_limit(request: ScheduleRequest, placements: list[Placement]) -> None:
    """Drop placements that cannot work.

    A rank must hold one microbatch on all its stages at the same time; if the loss needs the whole batch, all of them.
    """
    limits = request.memory_limit
    if limits is None:
        return
    needs: list[float] = []
    number = request.num_microbatches if request.whole_batch_loss else 1
    for placement in list(placements):
        need = held_by_ranks(request.costs, placement, number)
        needs.append(max(need))
        if any(map(exceeds, need, limits)):
            placements.remove(placement)
            rank = max(range(placement.num_ranks), key=lambda rank: need[rank] - limits[rank])
    if not placements:
        if request.whole_batch_loss:
            raise ScheduleError(
                f"memory_limit {limits[rank]:g} is too small for any schedule. With whole_batch_loss, rank {rank} "
                f"holds all {number} microbatches of a batch on all its stages ({request.stages_per_rank}) at once. "
                f"The smallest limit that works is {min(needs):g}. {HELPS_WHOLE_BATCH}"
            )
        raise ScheduleError(
            f"memory_limit {min(limits):g} is too small for any schedule. A rank must hold one microbatch on all its "
            f"stages ({request.stages_per_rank}) at once. The smallest limit that works is {min(needs):g}"
        )


def _hand_made(request: ScheduleRequest) -> Iterator[Schedule]:
    """Every schedule of another family that fits the stages, the placement if it is given, and the limit."""
    for family in families_allowing(request.stages_per_rank):
        if family.build is build_auto:
            continue
        schedule = family.build(request)
        if request.whole_batch_loss:
            schedule = schedule.with_whole_batch_loss()
        if request.placement not in (None, schedule.placement):
            continue
        limits = request.memory_limit
        if limits is None or not any(map(exceeds, peaks_of(schedule, request.costs), limits)):
            yield schedule


def _raw_candidates(problems: list[Problem], schedules: list[Schedule], deadline: Deadline) -> Iterator[_Candidate]:
    for schedule in schedules:
        for problem in problems:
            if problem.placement == schedule.placement and deadline.allows(2 * problem.num_actions):
                yield _measured(problem, problem.orders_of(schedule), schedule.name)


def _measured(problem: Problem, orders: Orders, origin: str) -> _Candidate:
    starts = earliest(problem, orders)
    assert starts is not None, "candidates are free of deadlock"
    return _Candidate(find_length(problem, orders, starts), problem, orders, origin)


def _policies(stages_per_rank: int) -> list[Policy]:
    """The policies to try, the generally better ones first."""
    if stages_per_rank == 1:
        return [
            Policy(weight_fit, forward_waits, input_waits)
            for input_waits, weight_fit, forward_waits in product((0.0, 0.5), (1.0, 0.0, 0.5), (1.0, 0.5, 0.0))
        ]
    return [
        Policy(weight_fit, forward_waits, input_waits, same_waits)
        for input_waits, same_waits, weight_fit, forward_waits in product(
            (0.0, 1.0), (1.0, 0.5), (1.0, 0.5), (1.0, 0.0)
        )
    ]


def _greedy_candidates(request: ScheduleRequest, problems: list[Problem], deadline: Deadline) -> Iterator[_Candidate]:
    """Try policies on a step of few microbatches, which has the same warm-up and cool-down; build the best in full."""
    policies = _policies(request.stages_per_rank)
    share = _SCREENING_ACTIONS // len(problems)
    # Fewer would not reach the steady part when a rank holds 2p; hand-made schedules are the better ones on a V anyway.
    least = (3 if len(problems) == 1 else 2) * request.num_ranks
    num_few = max(least, share // (len(policies) * 3 * problems[0].num_stages))
    screened: list[tuple[Length, int, Policy]] = []
    for index, problem in enumerate(problems):
        few = _problem(request, problem.placement, min(request.num_microbatches, num_few))
        for policy in policies[: max(4, share // few.num_actions)]:
            orders = build_greedy(few, policy, deadline) if deadline.allows(2 * few.num_actions) else None
            if orders is not None:
                screened.append((_measured(few, orders, "").length, index, policy))
    if not screened:
        return
    objective = _objective(length.makespan for length, _, _ in screened)
    screened.sort(key=lambda entry: objective.of(entry[0]))
    num_built = max(2, min(8, _BUILDING_ACTIONS // problems[0].num_actions))
    for _, index, policy in screened[:num_built]:
        in_time = deadline.allows(2 * problems[index].num_actions)
        orders = build_greedy(problems[index], policy, deadline) if in_time else None
        if orders is not None:
            yield _measured(problems[index], orders, "greedy")


def _improved(
    candidates: list[_Candidate], problems: list[Problem], deadline: Deadline, request: ScheduleRequest
) -> list[_Candidate]:
    """The improvements of the best, on every placement where there is time for it."""
    groups = [candidates]
    if problems[0].num_actions <= _SMALL:
        groups = [[candidate for candidate in candidates if candidate.problem is problem] for problem in problems]
    return [found for group in groups if group for found in _improve(group, deadline, request)]


def _improve(candidates: list[_Candidate], deadline: Deadline, request: ScheduleRequest) -> list[_Candidate]:
    """Justify the best few, and anneal or climb from the best of those: first for makespan, then for the span."""
    num_actions = candidates[0].problem.num_actions
    num_steps = min(_MAX_CLIMBING_STEPS, _CLIMBING_ACTIONS // num_actions, _CLIMBING_STEPS_PER_ACTION * num_actions)
    num_rounds = max(2, _JUSTIFYING_ACTIONS // num_actions)
    num_justified = max(1, min(4, num_rounds // 4))
    improved: list[_Candidate] = []
    for objective in (Objective(), _objective(candidate.length.makespan for candidate in candidates)):
        best = sorted(candidates + improved, key=lambda candidate: objective.of(candidate.length))
        for candidate in best[:num_justified]:
            if not deadline.allows(PASSES_OF_A_ROUND * num_actions):
                return improved
            orders = justify(
                candidate.problem,
                candidate.orders,
                objective,
                max_rounds=max(2, min(12, num_rounds // num_justified // 2)),
                patience=4,
                deadline=deadline,
            )
            improved.append(_measured(candidate.problem, orders, f"{candidate.origin.split(',')[0]}, improved"))
        if num_steps < _MIN_CLIMBING_STEPS or not deadline.allows(2 * num_actions):
            continue
        if objective.longest_makespan:
            objective = _objective(candidate.length.makespan for candidate in candidates + improved)
        temperatures: tuple[float, ...] = (0.0,)
        if num_actions <= _SMALL:
            temperatures = _TEMPERATURES[:1] if objective.longest_makespan else _TEMPERATURES
        start = min(improved, key=lambda candidate: objective.of(candidate.length))
        for seed, temperature in enumerate(temperatures):
            climb = Climb(start.problem, start.orders, objective, seed)
            orders = climb.run(num_steps, lower_bound(start.problem, objective), temperature, deadline)
            start = _measured(start.problem, orders, start.origin)
            improved.append(start)
    return improved


register(
    Family(
        "auto",
        build_auto,
        "searched for the given costs and memory limit; any number of stages a rank",
        is_search=True,
    )
)
