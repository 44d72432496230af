"""Weight gradients that cannot be deferred, so that a schedule has too little W to fill its bubbles with."""

from __future__ import annotations

from dataclasses import replace

from lightning_pp.telemetry.diagnosis.evidence import Evidence
from lightning_pp.telemetry.diagnosis.finding import Finding

_TOO_LITTLE = 0.6


def weight_finding(evidence: Evidence) -> Finding | None:
    """What a split backward would save if W had what the FLOPs of its operations say."""
    model, facts = evidence.model, evidence.facts
    num_stages = model.schedule.placement.num_stages
    costs = model.costs.per_stage(num_stages)
    backward_input, backward_weight = list(costs.backward_input), list(costs.backward_weight)
    stages, measured, expected = [], 0.0, 0.0
    for stage, share in enumerate(evidence.weight_share):
        possible = facts.weight_share(stage)
        if share is None or share >= _TOO_LITTLE * possible:
            continue
        both = backward_input[stage] + backward_weight[stage]
        backward_input[stage], backward_weight[stage] = both * (1 - possible), both * possible
        stages.append(stage)
        measured, expected = max(measured, share), max(expected, possible)
    if not stages:
        return None
    improved = replace(model.costs, backward_input=backward_input, backward_weight=backward_weight)
    gain = model.step_ms - model.with_costs(improved).step_ms
    num_units = sum(len(facts.stages[stage]) for stage in stages)
    return Finding(
        "weight_gradients",
        f"W of {num_units} units (stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, stages))}) cannot be "
        f"deferred: W is {measured:.0%} of their backward, by FLOPs {expected:.0%} could be. Functions of "
        "their own compute it, or compiled code that the log has named.",
        "Deferring them (linear layers of torch, or a unit's own backward_dw())",
        gain,
        gain / evidence.step_ms,
    )
