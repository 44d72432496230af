"""Ranks with more work than others: cut in other places, or a rank that is slower than its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import StageCosts
from lightning_pp.split.cut.unit_costs import UnitCost, calibrated, stage_costs
from lightning_pp.telemetry.diagnosis.evidence import Evidence
from lightning_pp.telemetry.diagnosis.finding import Finding, as_option

_MOST_OF_A_STAGE = 0.75
_FAR_SLOWER = 1.3


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes longer than others for units alike.

    Attributes:
        rank: The rank.
        factor: How many times as long it takes.
        unit_class: The class of the units.
    """

    rank: int
    factor: float
    unit_class: str


def slow_rank(evidence: Evidence) -> SlowRank | None:
    """The rank whose forward and whose backward take far longer by FLOPs than those of every rank with like units.

    Ranks are compared whose work is nearly all in units of one class and size; other units are not known well enough.
    """
    model, facts = evidence.model, evidence.facts
    placement = model.schedule.placement
    costs = model.costs.per_stage(placement.num_stages)
    speeds: dict[int, tuple[tuple[str, float], float, float]] = {}
    for rank in range(placement.num_ranks):
        stages = placement.stages_of_rank(rank)
        units = [unit for stage in stages for unit in facts.stages[stage]]
        kind = _kind_of_most(units, facts.unit_costs, facts.unit_classes)
        forward = sum(facts.unit_costs[unit].forward for unit in units)
        backward = sum(facts.unit_costs[unit].total for unit in units) - forward
        if kind is None or not forward or not backward:
            continue
        forward_ms = sum(costs.forward[stage] for stage in stages)
        backward_ms = sum(costs.backward_input[stage] + costs.backward_weight[stage] for stage in stages)
        speeds[rank] = (kind, forward_ms / forward, backward_ms / backward)
    for rank, (kind, forward, backward) in speeds.items():
        peers = [other[1:] for its, other in speeds.items() if its != rank and other[0] == kind]
        if len(peers) < 2:
            continue
        least = min(forward / max(peer[0] for peer in peers), backward / max(peer[1] for peer in peers))
        if least >= _FAR_SLOWER:
            typical = median(sum(peer) for peer in peers)
            return SlowRank(rank, (forward + backward) / typical, kind[0])
    return None


def balance_finding(evidence: Evidence) -> Finding | None:
    """Cuts in other places, if these are simulated to be better; names the rank that is to blame for it, if one is."""
    model, facts = evidence.model, evidence.facts
    placement = model.schedule.placement
    slow = slow_rank(evidence)
    if facts.cut_again is None or placement.num_ranks == 1:
        return None
    speeds = [1.0] * placement.num_ranks
    if slow is not None:
        speeds[slow.rank] = 1 / slow.factor
    of_stages = [speeds[rank] for rank in placement.rank_of_stage]
    try:
        units = calibrated(facts.unit_costs, model.costs, facts.stages)
    except ConfigurationError:
        return None
    for stage, names in enumerate(facts.stages):
        units.update({unit: units[unit].scaled(of_stages[stage]) for unit in names})
    cut = facts.cut_again(units, speeds, model.schedule)
    gain = 0.0 if cut is None else model.step_ms - model.with_costs(_costs_of(evidence, cut, units, of_stages)).step_ms
    points = [names[0] for names in (cut or [])[1:] if names]
    if slow is not None:
        return _slow_rank_finding(evidence, slow, units, gain, points)
    if gain <= 0 or not points:
        return None
    work = model.work_ms()
    longest = work.index(max(work))
    held = placement.stages_of_rank(longest)
    name = f"Stage {held[0]}" if len(held) == 1 else f"Rank {longest}"
    more = work[longest] * len(work) / sum(work) - 1
    return evidence.finding(
        "cuts",
        f"{name} takes {more:.0%} longer than the mean and holds up the step.",
        f"Cutting before {' and '.join(points)}",
        gain,
        *as_option("split_points", points),
    )


def _slow_rank_finding(
    evidence: Evidence, slow: SlowRank, units: Mapping[str, UnitCost], gain: float, points: Sequence[str]
) -> Finding:
    host = evidence.ranks[slow.rank].host
    placement = evidence.schedule.placement
    even = [1.0] * placement.num_stages
    repaired = evidence.model.with_costs(_costs_of(evidence, evidence.facts.stages, units, even))
    best = evidence.model.step_ms - repaired.step_ms
    seen = (
        f"Rank {slow.rank}{f' on host {host}' if host else ''} takes {slow.factor:.2g} times as long as the other "
        f"ranks for units of the same class and size ({slow.unit_class}). Check its device: one as fast as the "
        f"others would save {best:.0f} ms a step ({best / evidence.step_ms:.0%})."
    )
    if gain <= 0 or not points:
        return evidence.finding("slow_rank", seen, "Repairing it", best)
    remedy = f"Cutting for its speed, before {' and '.join(points)},"
    return evidence.finding("slow_rank", seen, remedy, gain, *as_option("split_points", list(points)))


def _costs_of(
    evidence: Evidence,
    cut: Sequence[Sequence[str]],
    units: Mapping[str, UnitCost],
    speeds_of_stages: Sequence[float],
) -> StageCosts:
    """Costs of stages that are cut like this."""
    stage_of_unit = {unit: stage for stage, names in enumerate(cut) for unit in names}
    costs = stage_costs(units, stage_of_unit, speeds_of_stages)
    now = evidence.model.costs
    return replace(costs, held_after_forward=now.held_after_forward, held_after_input=now.held_after_input)


def _kind_of_most(
    units: Sequence[str], costs: Mapping[str, UnitCost], classes: Mapping[str, str]
) -> tuple[str, float] | None:
    """Class and FLOPs of the units that nearly all of the work is in; None if they are of several kinds."""
    work: dict[tuple[str, float], float] = {}
    for unit in units:
        kind = (classes.get(unit, ""), float(f"{costs[unit].total:.2e}"))
        work[kind] = work.get(kind, 0.0) + costs[unit].total
    if not work:
        return None
    kind = max(work, key=lambda each: work[each])
    return kind if work[kind] >= _MOST_OF_A_STAGE * sum(work.values()) else None
