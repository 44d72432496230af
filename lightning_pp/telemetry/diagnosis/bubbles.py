"""Bubbles: another number of microbatches, another schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import Schedule, build_schedule
from lightning_pp.schedule.registry import families_allowing, schedule_family
from lightning_pp.schedule.simulation.memory import held_by_ranks
from lightning_pp.telemetry.diagnosis.evidence import Evidence, arrivals
from lightning_pp.telemetry.diagnosis.finding import Finding, as_option
from lightning_pp.telemetry.diagnosis.step_model import StepModel, scaled

_NEARLY_THE_BEST = 0.9
_MOST_MICROBATCHES_PER_RANK = 4  # as with num_microbatches="auto"; smaller ones may be slower by the row
_LARGEST_SEARCH = 512  # actions of a rank, for a search that is made while a training waits
_MORE_HELD = 1.01
_WORTH_ITS_MEMORY = 0.5


@dataclass(frozen=True)
class _Candidate:
    """A possible change."""

    name: str
    model: StepModel
    held: float


def microbatch_finding(evidence: Evidence) -> Finding | None:
    """More and smaller microbatches, of which an action's fixed time is paid more often."""
    model, facts = evidence.model, evidence.facts
    now = model.schedule
    num_samples = evidence.ranks[0].num_samples
    if not facts.names_schedule or now.whole_batch_loss or num_samples == 0:
        return None
    found = []
    for number in _numbers(num_samples, now):
        try:
            schedule = _build(evidence, _family(now), number)
        except ScheduleError:
            continue
        size = now.num_microbatches / number
        costs = scaled(model.costs, size, facts.fixed_ms, now.placement.num_stages)
        smaller_ones = replace(model, costs=costs, arrivals=model.arrivals.with_early_ones(size))
        changed = smaller_ones.with_schedule(schedule)
        found.append(_Candidate(str(number), changed, _most_held(changed)))
    near = _nearly_best(evidence, found, _NEARLY_THE_BEST)
    if not near:
        return None
    best = near[0]
    gain = model.step_ms - best.model.step_ms
    smaller = num_samples / best.model.schedule.num_microbatches
    return evidence.finding(
        "microbatches",
        f"{now.num_microbatches} microbatches on {now.placement.num_ranks} ranks leave {model.bubble:.0%} bubble. "
        f"{best.name} microbatches of size {smaller:g} would leave {best.model.bubble:.0%}, if as fast per row.",
        f"{best.name} microbatches",
        gain,
        *as_option("num_microbatches", int(best.name)),
    )


def schedule_finding(evidence: Evidence) -> Finding | None:
    """Another schedule on the same placement."""
    best = best_schedule(evidence)
    if best is None:
        return None
    model = evidence.model
    # with messages as in the fastest step, too: where processes share cores, it is no link that holds some of them up
    steady = replace(model, arrivals=arrivals(model.schedule, evidence.ranks, min))
    steady_gain = steady.step_ms - steady.with_schedule(best.model.schedule).step_ms
    gain = min(steady_gain, model.step_ms - best.model.step_ms)
    return evidence.finding(
        "schedule",
        f"{model.schedule.name} leaves {model.bubble:.0%} bubble. {best.name} would leave {best.model.bubble:.0%}"
        f"{held_text(evidence, best.held, _most_held(model))}.",
        best.name,
        gain,
        *as_option("schedule", best.name),
    )


def best_schedule(evidence: Evidence) -> _Candidate | None:
    """The best that holds no more than now, if it gains half of what is possible; else of the nearly best the leanest.

    None if none is better than now. A search has compared them all: only noise makes another one better.
    """
    model = evidence.model
    has_searched = schedule_family(_family(model.schedule)).is_search
    if has_searched or not evidence.facts.names_schedule or model.schedule.whole_batch_loss:
        return None
    found = []
    for name, schedule in _schedules(evidence):
        changed = model.with_schedule(schedule)
        found.append(_Candidate(name, changed, _most_held(changed)))
    near = _nearly_best(evidence, found, _NEARLY_THE_BEST)
    most = _MORE_HELD * _most_held(model)
    frugal = [candidate for candidate in _nearly_best(evidence, found, _WORTH_ITS_MEMORY) if candidate.held <= most]
    if frugal:
        return min(frugal, key=lambda candidate: candidate.model.step_ms)
    return min(near, key=lambda candidate: candidate.held, default=None)


def held_text(evidence: Evidence, held: float, before: float) -> str:
    """That something holds more than now, if it does."""
    if held <= _MORE_HELD * before:
        return ""
    unit, factor = ("microbatches", 1) if evidence.facts.held is None else ("GiB", 1) if held >= 0.1 else ("MiB", 1024)
    return f", and a rank would hold up to {factor * held:.3g} {unit} instead of {factor * before:.3g}"


def _schedules(evidence: Evidence) -> Iterator[tuple[str, Schedule]]:
    """What to name and what comes of it: those that can be on this placement and keep the limit."""
    now = evidence.schedule
    stages_per_rank = now.placement.num_stages // now.placement.num_ranks
    is_large = max(map(len, now.programs)) * now.placement.num_ranks > _LARGEST_SEARCH
    for family in families_allowing(stages_per_rank):
        if family.name == _family(now) or (family.is_search and is_large):
            continue
        try:
            schedule = _build(evidence, family.name, now.num_microbatches)
        except ScheduleError:
            continue
        if schedule.placement == now.placement:
            yield family.name, schedule


def _family(schedule: Schedule) -> str:
    """What the user writes for it; a search adds to its name how it was found."""
    return schedule.name.partition(" ")[0]


def _build(evidence: Evidence, name: str, num_microbatches: int) -> Schedule:
    """A schedule of that name on the placement at hand."""
    now, costs = evidence.schedule, evidence.model.costs
    placement = now.placement
    is_search = schedule_family(name).is_search
    limit = evidence.facts.memory_limit_gib
    limits: tuple[float, ...] | float | None = limit
    if is_search and limit is None:  # as the strategy has it: what zb_h2 holds
        limits = held_by_ranks(costs, placement, 2 * placement.num_ranks)
    return build_schedule(
        name,
        num_ranks=placement.num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=placement.num_stages // placement.num_ranks,
        costs=costs,
        memory_limit=limits,
        placement=placement if is_search else None,
        quick=True,
    )


def _numbers(num_samples: int, now: Schedule) -> list[int]:
    """Numbers of microbatches to try: those that divide the batch."""
    most = min(num_samples, _MOST_MICROBATCHES_PER_RANK * now.placement.num_ranks)
    return [number for number in range(now.num_microbatches + 1, most + 1) if num_samples % number == 0]


def _nearly_best(evidence: Evidence, found: Sequence[_Candidate], nearly: float) -> list[_Candidate]:
    """Those whose gain is at least ``nearly`` times that of the best; none where nothing gains."""
    now = evidence.model.step_ms
    best = max((now - candidate.model.step_ms for candidate in found), default=0.0)
    return [candidate for candidate in found if best > 0 and now - candidate.model.step_ms >= nearly * best]


def _most_held(model: StepModel) -> float:
    return max(model.schedule.simulate(model.costs).peak_memory)
