"""Waits: for a loader, and for messages over a link that is slower than others."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

from lightning_pp.telemetry.diagnosis.bubbles import best_schedule, held_text
from lightning_pp.telemetry.diagnosis.evidence import Evidence, arrivals
from lightning_pp.telemetry.diagnosis.finding import Finding, as_option
from lightning_pp.telemetry.diagnosis.step_model import Arrivals

_FAR_SLOWER = 3.0
_LEAST_LINK_MS = 0.5
_LEAST_GAIN = 0.03  # of a step, by a link that is as fast as the others: with less it holds nothing up
_WORTH_A_CURE = 0.25


def data_finding(evidence: Evidence) -> Finding | None:
    """Loader processes, where a step waits for data."""
    waits = [rank.data_ms for rank in evidence.ranks]
    slowest = waits.index(max(waits))
    rank = evidence.ranks[slowest]
    if rank.data_ms <= 0:
        return None
    without = evidence.model.without(waits).step_ms
    workers = rank.num_workers or 0
    # a batch takes its loader the wait, and besides what its workers have done during the rest of a step
    batch_ms = rank.data_ms + (workers * rank.step_ms if workers else 0.0)
    wanted = max(math.ceil(batch_ms / max(without, 1e-3)) + 1, workers + 1)
    number = min(wanted, max(rank.num_cores, 2))
    if number <= workers:
        return None
    left = max(0.0, batch_ms / number - without)
    gain = evidence.model.step_ms - evidence.model.without([ms - min(ms, left) for ms in waits]).step_ms
    return evidence.finding(
        "data",
        f"Rank {slowest}{f' on host {rank.host}' if rank.host else ''} waits {rank.data_ms / rank.step_ms:.0%} of each "
        f"step for its loader, which has {workers or 'no'} worker process{'' if workers == 1 else 'es'}.",
        f"{number} worker processes",
        gain,
        f"data.num_workers={number}",
        f"DataLoader(num_workers={number})",
    )


def link_finding(evidence: Evidence) -> Finding | None:
    """A link over which messages take far longer than over others, with a schedule that waits less for it, if any."""
    model = evidence.model
    placement = model.schedule.placement
    links = {
        stage: model.arrivals.forward[stage + 1]
        for stage in range(placement.num_stages - 1)
        if placement.rank_of_stage[stage] != placement.rank_of_stage[stage + 1]
    }
    if not links:
        return None
    slowest = max(links, key=lambda stage: links[stage])
    others = [ms for stage, ms in links.items() if stage != slowest]
    usual = max(0.0, median(others)) if others else 0.0
    ranks = placement.rank_of_stage[slowest], placement.rank_of_stage[slowest + 1]
    hosts = [evidence.ranks[rank].host for rank in ranks]
    is_within_host = all(hosts) and hosts[0] == hosts[1]
    fastest = min(links[slowest], arrivals(model.schedule, evidence.ranks, min).forward[slowest + 1])
    # processes that share cores hold some messages up; the only link, if it is within a host, is compared with nothing
    if fastest < max(_FAR_SLOWER * usual, _LEAST_LINK_MS) or (is_within_host and not others):
        return None
    forward, backward = list(model.arrivals.forward), list(model.arrivals.backward)
    forward[slowest + 1] = backward[slowest] = usual
    repaired = replace(model, arrivals=Arrivals(tuple(forward), tuple(backward)))
    possible = model.step_ms - repaired.step_ms
    if possible < _LEAST_GAIN * evidence.step_ms:
        return None
    where = f"rank {ranks[0]} and rank {ranks[1]}"
    if all(hosts):
        where += f" (both on {hosts[0]})" if is_within_host else f" ({hosts[0]} and {hosts[1]})"
    waiting = max(ranks, key=lambda rank: _wait_ms(evidence, rank))
    seen = (
        f"Rank {waiting} waits {_wait_ms(evidence, waiting) / evidence.step_ms:.0%} of the step for messages. Those "
        f"between {where} take {links[slowest]:.3g} ms{f', but {usual:.2g} ms over other links' if others else ''}"
    )
    best = best_schedule(evidence)
    gain = model.step_ms - best.model.step_ms if best is not None else 0.0
    if best is None or gain < possible * _WORTH_A_CURE:
        remedy = "A link that is as fast as the others" if others else "A link that takes no time"
        return evidence.finding("slow_link", f"{seen}.", remedy, possible)
    held = held_text(evidence, best.held, max(model.schedule.simulate(model.costs).peak_memory))
    return evidence.finding(
        "slow_link",
        f"{seen}. {best.name} has work that hides more of this wait{held}.",
        best.name,
        gain,
        *as_option("schedule", best.name),
    )


def _wait_ms(evidence: Evidence, rank: int) -> float:
    return sum(moment.wait_ms for moment in evidence.ranks[rank].times)
