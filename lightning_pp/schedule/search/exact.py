"""The shortest step by an exact solver, for small pipelines: the yardstick of the search.

Needs OR-tools (the extra ``exact``), which is imported only here and only when called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.program.coded import B, F, I, W
from lightning_pp.schedule.search.problem import UNLIMITED, Orders, Problem
from lightning_pp.schedule.search.timing import earliest, length_of

_TICKS_PER_STEP = 1_000_000
"""CP-SAT knows only whole numbers: times are rounded to ticks, about so many in the makespan it starts from."""


@dataclass(frozen=True)
class ExactResult:
    """What the solver found.

    Attributes:
        orders: The best orders.
        makespan: Their makespan, milliseconds.
        lower_bound: No orders have a smaller makespan, up to rounding to ticks.
        optimal: Whether the two are proven equal.
    """

    orders: Orders
    makespan: float
    lower_bound: float
    optimal: bool


def solve_exactly(
    problem: Problem, start: Orders, *, time_limit_s: float = 60.0, num_workers: int = 1, seed: int = 0
) -> ExactResult:
    """Minimise the makespan, beginning from the legal orders ``start``.

    Variables are the starts of all F, I and W; B is I and W in a row. Microbatches are alike, so each stage takes them
    in their order. Memory is a reservoir per rank that must stay within the limit.

    Raises:
        ScheduleError: OR-tools is not installed, or there is a limit and I holds more than F.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ScheduleError("exact search needs OR-tools: pip install 'ortools>=9.10'") from error
    n, m = problem.num_stages, problem.num_microbatches
    has_limit = min(problem.limits) < UNLIMITED
    if has_limit and any(change > 0 for change in problem.held_change[I * n : W * n]):
        raise ScheduleError("exact search needs held_after_input <= held_after_forward on every stage")
    starts = earliest(problem, start)
    assert starts is not None, "orders must be free of deadlock"
    horizon_ms = length_of(problem, start, starts).makespan
    scale = _TICKS_PER_STEP / horizon_ms if horizon_ms else 1.0
    model = cp_model.CpModel()
    ticks = [round(duration * scale) for duration in problem.duration]
    # Rounded hints may end a few ticks after the rounded makespan.
    horizon = _TICKS_PER_STEP + 6 * n * m
    begin = [model.new_int_var(0, horizon, f"{code}") for code in range(3 * n * m)]
    _add_precedences(model, problem, begin, ticks, scale)
    _add_ranks(model, problem, begin, ticks)
    if problem.whole_batch_loss:
        _add_whole_batch(model, problem, begin, ticks)
    makespan = model.new_int_var(0, horizon, "makespan")
    for stage in range(n):
        model.add(makespan >= begin[(W * n + stage) * m + m - 1] + ticks[W * n + stage])
    model.minimize(makespan)
    for order, times in zip(start, starts, strict=True):
        for code, time in zip(order, times, strict=True):
            if code // m < B * n:
                model.add_hint(begin[code], round(time * scale))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_workers
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactResult(start, horizon_ms, solver.best_objective_bound / scale, optimal=False)
    orders = _read_orders(problem, [solver.value(variable) for variable in begin])
    found = earliest(problem, orders)
    assert found is not None, "the solver keeps precedences"
    length = length_of(problem, orders, found)
    return ExactResult(orders, length.makespan, solver.best_objective_bound / scale, optimal=status == cp_model.OPTIMAL)


def _add_precedences(model: Any, problem: Problem, begin: list[Any], ticks: list[int], scale: float) -> None:
    """What needs what, and the microbatches of each row one after the other."""
    n, m = problem.num_stages, problem.num_microbatches
    for row in range(B * n):
        needed = ((problem.needs[row], problem.needs_latency[row]), (problem.needs_own[row], 0.0))
        for microbatch in range(m):
            for other, latency in needed:
                if other >= 0:
                    done = begin[other * m + microbatch] + ticks[other] + round(latency * scale)
                    model.add(begin[row * m + microbatch] >= done)
            if microbatch:
                model.add(begin[row * m + microbatch] >= begin[row * m + microbatch - 1] + ticks[row])


def _add_whole_batch(model: Any, problem: Problem, begin: list[Any], ticks: list[int]) -> None:
    """The first backward of the last stage after its last forward; the others follow from what needs what."""
    n, m = problem.num_stages, problem.num_microbatches
    model.add(begin[(I * n + n - 1) * m] >= begin[(F * n + n - 1) * m + m - 1] + ticks[F * n + n - 1])


def _add_ranks(model: Any, problem: Problem, begin: list[Any], ticks: list[int]) -> None:
    """One action at a time on a rank, and its memory."""
    n, m = problem.num_stages, problem.num_microbatches
    for rank, limit in enumerate(problem.limits):
        rows = [kind * n + stage for stage in problem.placement.stages_of_rank(rank) for kind in (F, I, W)]
        codes = [row * m + microbatch for row in rows for microbatch in range(m)]
        interval: Callable[..., Any] = model.new_fixed_size_interval_var
        model.add_no_overlap([interval(begin[code], ticks[code // m], f"on {code}") for code in codes])
        if limit == UNLIMITED:
            continue
        # Memory is whole numbers too: six decimals of small numbers, whole units of large ones such as bytes.
        unit = 1_000_000 if limit < 1_000_000 else 1
        times, changes = [], []
        for stage in problem.placement.stages_of_rank(rank):
            forward = round(problem.held_change[F * n + stage] * unit)
            late = round(-problem.held_change[W * n + stage] * unit)
            for microbatch in range(m):
                times += [
                    begin[(F * n + stage) * m + microbatch],
                    begin[(I * n + stage) * m + microbatch] + ticks[I * n + stage],
                    begin[(W * n + stage) * m + microbatch] + ticks[W * n + stage],
                ]
                changes += [forward, late - forward, -late]
        model.add_reservoir_constraint(
            times, changes, min_level=-sum(map(abs, changes)), max_level=int(limit * unit + 1e-6)
        )


def _read_orders(problem: Problem, times: list[int]) -> Orders:
    """Sort each rank's actions by time; of two at one time the one that comes first in a chain."""
    n, m = problem.num_stages, problem.num_microbatches
    orders: Orders = []
    for rank in range(problem.placement.num_ranks):
        rows = [kind * n + stage for stage in problem.placement.stages_of_rank(rank) for kind in (F, I, W)]
        codes = [row * m + microbatch for row in rows for microbatch in range(m)]
        orders.append(sorted(codes, key=lambda code: (times[code], code)))
    return orders
