"""The inputs of findings: measurements of some steps of one schedule, and facts of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import Action, ActionKind, Schedule, StageCosts
from lightning_pp.split.cut.unit_costs import UnitCost
from lightning_pp.telemetry.diagnosis.finding import Finding
from lightning_pp.telemetry.diagnosis.step_model import Arrivals, StepModel

_WAITED_MS = 0.05
_WAITED_FRACTION = 0.05  # of a mean action; a receive that has nothing to wait for takes its time too
_BACKWARDS = (ActionKind.I, ActionKind.B)

CutAgain = Callable[[Mapping[str, UnitCost], Sequence[float], Schedule], Sequence[Sequence[str]] | None]
"""The units of each stage that are best for such costs of units on a rank of speed 1, such speeds of ranks and such a
schedule; None if the model cannot be cut."""


class ProductWeight(NamedTuple):
    """A trainable parameter that a unit multiplies by: its name, its shape, and the FLOPs of these products in F."""

    name: str
    shape: tuple[int, ...]
    flops: float


@dataclass(frozen=True)
class PlanFacts:
    """Facts of the plan.

    Attributes:
        stages: For each stage, the units that the step calls, in call order.
        unit_costs: Every called unit's FLOPs, from the dry run.
        unit_classes: Every unit's class.
        held: ``held_after_forward`` and ``held_after_input`` of a microbatch on each stage, GiB; None if not known.
        memory_limit_gib: What a rank may hold of microbatches, or None.
        cut_again: Cuts the model by other costs; None if it cannot be cut in other places.
        names_schedule: Whether another schedule can be named: this one is not from a file.
        fixed_ms: What of an action's time is taken not to depend on the rows of a microbatch, milliseconds.
        product_weights: Of each unit.
    """

    stages: Sequence[Sequence[str]]
    unit_costs: Mapping[str, UnitCost]
    unit_classes: Mapping[str, str] = field(default_factory=dict)
    held: StageCosts | None = None
    memory_limit_gib: float | None = None
    cut_again: CutAgain | None = None
    names_schedule: bool = True
    fixed_ms: float = 0.0
    product_weights: Mapping[str, Sequence[ProductWeight]] = field(default_factory=dict)

    def weight_share(self, stage: int) -> float:
        """The part that W has of the backward of ``stage``, by FLOPs."""
        weight = sum(self.unit_costs[unit].backward_weight for unit in self.stages[stage])
        both = weight + sum(self.unit_costs[unit].backward_input for unit in self.stages[stage])
        return weight / both if both else 0.5


@dataclass(frozen=True)
class RankEvidence:
    """What one rank measured: medians or means over the same steps.

    Attributes:
        times: Its F, I, W and B, in the order of its program; mean moments.
        step_ms: From the end of one batch to the end of the next.
        data_ms: Of that, how long it waited for its loader.
        host: The name of its host.
        num_samples: Samples of a batch.
        num_workers: Worker processes of its loader; None if that is not known.
        num_cores: Cores for this rank.
        steps: The same for each step; empty: ``times`` are of one.
        deferred_shapes: Shapes of the parameters whose gradients some W computed.
    """

    times: Sequence[ActionTimes]
    step_ms: float
    data_ms: float = 0.0
    host: str = ""
    num_samples: int = 0
    num_workers: int | None = None
    num_cores: int = 1
    steps: Sequence[Sequence[ActionTimes]] = ()
    deferred_shapes: Set[tuple[int, ...]] = frozenset()


@dataclass(frozen=True)
class Evidence:
    """Everything that a diagnosis uses.

    Attributes:
        facts: Of the plan.
        ranks: What each rank measured.
        model: The step as it was, of measured parts.
        weight_share: The part of W in the measured backward of each stage; None where no backward was split.
    """

    facts: PlanFacts
    ranks: Sequence[RankEvidence]
    model: StepModel
    weight_share: Sequence[float | None]

    @property
    def step_ms(self) -> float:
        """The measured time of a step."""
        return max(rank.step_ms for rank in self.ranks)

    @property
    def schedule(self) -> Schedule:
        """What was run."""
        return self.model.schedule

    def finding(self, cause: str, seen: str, remedy: str, gain_ms: float, *options: str) -> Finding:
        """A :class:`Finding`, with its gain by the measured time of a step."""
        return Finding(cause, seen, remedy, gain_ms, gain_ms / self.step_ms, *options)

    @classmethod
    def of(cls, schedule: Schedule, ranks: Sequence[RankEvidence], facts: PlanFacts) -> Evidence:
        """Puts together what the ranks measured under ``schedule``."""
        costs, shares = _costs(schedule, ranks, facts)
        if facts.held is not None:
            held = facts.held
            costs = replace(costs, held_after_forward=held.held_after_forward, held_after_input=held.held_after_input)
        # Waits for others are between steps as well, where a rank joins a collective of the optimizer: work is what the
        # rank with the least of it has.
        busy = [rank.times[-1].end_ms - rank.times[0].asked_ms for rank in ranks]
        work = min(max(0.0, rank.step_ms - rank.data_ms - ms) for rank, ms in zip(ranks, busy, strict=True))
        between = tuple(work + rank.data_ms for rank in ranks)
        return cls(facts, ranks, StepModel(schedule, costs, arrivals(schedule, ranks), between), shares)


def _costs(
    schedule: Schedule, ranks: Sequence[RankEvidence], facts: PlanFacts
) -> tuple[StageCosts, list[float | None]]:
    """Mean times of the actions of each stage, and the measured share of W in its split backwards.

    Where a stage has no split backward, B counts as I and W by FLOPs, and by how far other stages are from theirs.
    """
    num_stages = schedule.placement.num_stages
    found: dict[tuple[int, ActionKind], list[float]] = {}
    for rank in ranks:
        for moment in rank.times:
            found.setdefault((moment.action.stage, moment.action.kind), []).append(moment.work_ms)

    def mean(stage: int, kind: ActionKind) -> float | None:
        values = found.get((stage, kind))
        return sum(values) / len(values) if values else None

    shares: list[float | None] = []
    for stage in range(num_stages):
        split = mean(stage, ActionKind.I), mean(stage, ActionKind.W)
        whole = (split[0] or 0.0) + (split[1] or 0.0)
        shares.append((split[1] or 0.0) / whole if split[0] is not None and whole else None)
    measured = [
        share / facts.weight_share(stage)
        for stage, share in enumerate(shares)
        if share is not None and facts.weight_share(stage)
    ]
    of_flops = min(1.0, median(measured)) if measured else 1.0
    forward, backward_input, backward_weight = [], [], []
    for stage in range(num_stages):
        share = shares[stage]
        used = facts.weight_share(stage) * of_flops if share is None else share
        # microbatches with a B and microbatches with I and W, all of which the stage runs in a step
        total = sum(sum(found.get((stage, kind), ())) for kind in (ActionKind.I, ActionKind.W, ActionKind.B))
        backward = total / schedule.num_microbatches
        forward.append(mean(stage, ActionKind.F) or 0.0)
        backward_input.append(backward * (1 - used))
        backward_weight.append(backward * used)
    return StageCosts(forward, backward_input, backward_weight), shares


def arrivals(
    schedule: Schedule, ranks: Sequence[RankEvidence], of_steps: Callable[[list[float]], float] = median
) -> Arrivals:
    """How long messages took between ranks whose clocks may differ; in one of several steps, as ``of_steps`` says.

    Who waited for a message began when it came. The time from the sender's end to that is the message's time and the
    difference of the two clocks. On the way back the difference counts the other way, so that the sum of both is the
    time of two messages. Each is taken for half of it; nothing that is simulated depends on which half, since every way
    around between two ranks goes by both. A link of which one direction was never waited for is taken to be as others.
    """
    placement = schedule.placement
    steps = list(zip(*(rank.steps or [rank.times] for rank in ranks), strict=True))
    totals: dict[int, float] = {}
    links = [s for s in range(placement.num_stages - 1) if placement.rank_of_stage[s] != placement.rank_of_stage[s + 1]]
    for stage in links:
        found = [total for times in steps if (total := _there_and_back(stage, times)) is not None]
        if found:
            totals[stage] = of_steps(found)
    usual = median(totals.values()) if totals else 0.0
    forward, backward = [0.0] * placement.num_stages, [0.0] * placement.num_stages
    for stage in links:
        forward[stage + 1] = backward[stage] = totals.get(stage, usual) / 2
    return Arrivals(tuple(forward), tuple(backward))


def _there_and_back(stage: int, ranks: Sequence[Sequence[ActionTimes]]) -> float | None:
    """The time of a message from ``stage`` to the next and one back in one step.

    Of those that were waited for the shortest: others were held up by what the machine did besides.
    """
    work = [moment.work_ms for times in ranks for moment in times]
    least = max(_WAITED_MS, _WAITED_FRACTION * sum(work) / len(work))
    time_of: dict[Action, ActionTimes] = {moment.action: moment for times in ranks for moment in times}
    there: list[float] = []
    back: list[float] = []
    for action, moment in time_of.items():
        if moment.wait_ms <= least:
            continue
        if action.kind is ActionKind.F and action.stage == stage + 1:
            sent = time_of.get(Action(stage, ActionKind.F, action.microbatch))
            there += [moment.start_ms - sent.end_ms] if sent is not None else []
        elif action.kind in _BACKWARDS and action.stage == stage:
            for kind in _BACKWARDS:
                sent = time_of.get(Action(stage + 1, kind, action.microbatch))
                back += [moment.start_ms - sent.end_ms] if sent is not None else []
    return min(there) + min(back) if there and back else None
