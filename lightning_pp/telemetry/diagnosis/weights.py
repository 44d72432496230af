"""Weight gradients that were not deferred, so that a schedule has too little W to fill its bubbles with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from torch.nn import Parameter

from lightning_pp.errors import enumerate_names
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.telemetry.diagnosis.evidence import Evidence, ProductWeight
from lightning_pp.telemetry.diagnosis.finding import Finding


def product_weights(record: StepRecord, parameters: Mapping[str, Parameter]) -> dict[str, list[ProductWeight]]:
    """For each unit, the trainable parameters that its forward multiplies by.

    Operations have shapes and no names. A parameter counts if the last matrix of a product has its size, unless the
    unit has more parameters of that size than a call has such products.

    Args:
        record: A dry run of the step.
        parameters: All parameters of the model, or fakes of them.
    """
    flops: dict[str, Counter[int]] = {}
    products: dict[str, Counter[int]] = {}
    for call in record.calls:
        of_unit, of_call = flops.setdefault(call.unit, Counter()), Counter[int]()
        for work, number in call.work.items():
            matrices = [shape for shape, _ in work.operands if len(shape) > 1]
            if work.flops and work.has_weight and matrices:
                of_unit[prod(matrices[-1])] += work.flops * number
                of_call[prod(matrices[-1])] += number
        products[call.unit] = products.get(call.unit, Counter()) | of_call
    found: dict[str, list[ProductWeight]] = {}
    for unit, of_unit in flops.items():
        own = {name: p for name, p in parameters.items() if name.startswith(f"{unit}.") and p.dim() > 1}
        sizes = Counter(parameter.numel() for parameter in own.values())
        found[unit] = [
            ProductWeight(name, tuple(parameter.shape), of_unit[size])
            for name, parameter in own.items()
            if parameter.requires_grad and 0 < sizes[size := parameter.numel()] <= products[unit][size]
        ]
    return found


def weight_finding(evidence: Evidence) -> Finding | None:
    """What a split backward would save if W also had the weights that no W of these steps was for."""
    model, facts = evidence.model, evidence.facts
    placement = model.schedule.placement
    costs = model.costs.per_stage(placement.num_stages)
    backward_input, backward_weight = list(costs.backward_input), list(costs.backward_weight)
    stages: list[int] = []
    names: list[str] = []
    for stage, share in enumerate(evidence.weight_share):
        deferred = evidence.ranks[placement.rank_of_stage[stage]].deferred_shapes
        weights = [weight for unit in facts.stages[stage] for weight in facts.product_weights.get(unit, ())]
        others = [weight for weight in weights if weight.shape not in deferred]
        if share is None or not others:
            continue
        possible = facts.weight_share(stage)
        of_others = possible * sum(weight.flops for weight in others) / sum(weight.flops for weight in weights)
        both = backward_input[stage] + backward_weight[stage]
        improved = max(share, min(possible, share + of_others))
        backward_input[stage], backward_weight[stage] = both * (1 - improved), both * improved
        stages.append(stage)
        names += [weight.name for weight in others]
    if not stages:
        return None
    all_deferred = replace(model.costs, backward_input=backward_input, backward_weight=backward_weight)
    gain = model.step_ms - model.with_costs(all_deferred).step_ms
    named = enumerate_names(names, 3)
    return evidence.finding(
        "weight_gradients",
        f"The weight gradients of {named} (stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, stages))}) are "
        "not deferred: weight @ input, einsum, functions of your own and code that you compile compute them in I.",
        "Deferring them (F.linear or @ with the parameter, or a unit's own backward_dw())",
        gain,
    )
