"""Sums over steps of the work of one rank and its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from types import MappingProxyType

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import ActionKind


@dataclass(frozen=True)
class StageSums:
    """One stage's sums over the microbatches of some steps; times in milliseconds.

    Attributes:
        num_microbatches: Microbatches that went through.
        forward_ms: Time in F.
        backward_input_ms: Time in I, and in B, which does both parts of the backward at once.
        backward_weight_ms: Time in W.
        wait_ms: Time that the rank stood waiting for what the stage's actions needed from other ranks.
        sent_bytes: What the stage sent to other ranks.
        gather_exposed_ms: Time that the rank stood waiting for the gathers of the stage's parameters.
        gather_hidden_ms: Time that these ran beside other work.
        reduce_exposed_ms: Time that the rank stood waiting for the reductions of the stage's gradients.
        reduce_hidden_ms: Time that these ran beside other work.
    """

    num_microbatches: float = 0.0
    forward_ms: float = 0.0
    backward_input_ms: float = 0.0
    backward_weight_ms: float = 0.0
    wait_ms: float = 0.0
    sent_bytes: float = 0.0
    gather_exposed_ms: float = 0.0
    gather_hidden_ms: float = 0.0
    reduce_exposed_ms: float = 0.0
    reduce_hidden_ms: float = 0.0

    def __add__(self, other: StageSums) -> StageSums:
        return StageSums(*map(add, vars(self).values(), vars(other).values()))


_FIELD_OF_KIND = {
    ActionKind.F: "forward_ms",
    ActionKind.I: "backward_input_ms",
    ActionKind.B: "backward_input_ms",
    ActionKind.W: "backward_weight_ms",
}


@dataclass(frozen=True)
class RankSums:
    """One rank's sums over some steps; times in milliseconds.

    Attributes:
        num_steps: Number of steps.
        work_ms: Time in F, I, W and B.
        span_ms: From the start of the first to the end of the last action, added up over the steps.
        stages: The rank's stages, in the order of the model.
    """

    num_steps: float
    work_ms: float
    span_ms: float
    stages: tuple[StageSums, ...]

    @classmethod
    def none(cls, num_stages: int) -> RankSums:
        """No step yet, on a rank of ``num_stages`` stages."""
        return cls(0.0, 0.0, 0.0, (StageSums(),) * num_stages)

    @classmethod
    def of_step(
        cls,
        times: Sequence[ActionTimes],
        stages: Sequence[int],
        sent_bytes: Mapping[int, int] = MappingProxyType({}),
        collectives: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
    ) -> RankSums:
        """One step.

        Args:
            times: The actions of the rank in the order in which it ran them.
            stages: The stages that the rank holds.
            sent_bytes: What each of them sent to other ranks.
            collectives: The fields of each about gathers and reductions.
        """
        sums = {stage: dict.fromkeys(StageSums.__dataclass_fields__, 0.0) for stage in stages}
        for stage in stages:
            sums[stage]["sent_bytes"] = float(sent_bytes.get(stage, 0))
            sums[stage].update(collectives.get(stage, {}))
        for moment in times:
            of_stage = sums[moment.action.stage]
            of_stage[_FIELD_OF_KIND[moment.action.kind]] += moment.work_ms
            of_stage["wait_ms"] += moment.wait_ms
            of_stage["num_microbatches"] += moment.action.kind is ActionKind.F
        return cls(
            num_steps=1.0,
            work_ms=sum(moment.work_ms for moment in times),
            span_ms=times[-1].end_ms - times[0].start_ms + times[0].early_ms if times else 0.0,
            stages=tuple(StageSums(**sums[stage]) for stage in stages),
        )

    def __add__(self, other: RankSums) -> RankSums:
        stages = tuple(map(add, self.stages, other.stages))
        return RankSums(
            self.num_steps + other.num_steps, self.work_ms + other.work_ms, self.span_ms + other.span_ms, stages
        )

    @property
    def bubble_fraction(self) -> float:
        """``1 - work / span``, as the items of :attr:`lightning_pp.schedule.Simulation.bubble_fraction` have it."""
        return 1.0 - self.work_ms / self.span_ms if self.span_ms else 0.0


def imbalance_of(ranks: Sequence[RankSums]) -> float:
    """By how much the rank with the most work has more than the mean of the ranks, as a fraction of that mean."""
    mean = sum(rank.work_ms for rank in ranks) / len(ranks)
    return max(rank.work_ms for rank in ranks) / mean - 1.0 if mean else 0.0


def longest_span_bubble(ranks: Sequence[RankSums]) -> float:
    """``1 - work / longest span``, work being the mean over the ranks: one number for the pipeline.

    The definition of the zero-bubble papers (arXiv:2401.10241), as in
    :attr:`lightning_pp.schedule.Simulation.bubble_fraction`.
    """
    longest = max(rank.span_ms for rank in ranks)
    return 1.0 - sum(rank.work_ms for rank in ranks) / len(ranks) / longest if longest else 0.0
