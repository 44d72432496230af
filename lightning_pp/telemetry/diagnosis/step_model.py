"""Predicts the time from one step to the next, in a row of steps that overlap, by the simulator of schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_pp.schedule import Schedule, StageCosts
from lightning_pp.schedule.simulation.execution import CostTables

_STEPS_SIMULATED = 9
_STEPS_AVERAGED = 4


@dataclass(frozen=True)
class Arrivals:
    """How long after an action's end its message arrives, milliseconds, by the stage that receives it.

    Less than 0 where a stage sends before the action is over, as a B of modules that keep back weight gradients does.

    Attributes:
        forward: Of values, from the stage before.
        backward: Of gradients, from the stage after.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def with_early_ones(self, factor: float) -> Arrivals:
        """With what is sent early so many times as long before the end; 0 for actions that do not send early."""
        return Arrivals(
            *(tuple(ms if ms > 0 else ms * factor for ms in times) for times in (self.forward, self.backward))
        )


@dataclass(frozen=True)
class StepModel:
    """The parts of a step. Every rank begins its next step after the work between steps; there is no barrier.

    Gathers and reductions are in the times of the actions, as far as these wait for them.

    Attributes:
        schedule: The programs.
        costs: F, I and W of each stage; its other times are not looked at.
        arrivals: Of messages.
        between_ms: By rank, what lies between the last action of a step and the first of the next: reading data, the
            optimizer, logs.
    """

    schedule: Schedule
    costs: StageCosts
    arrivals: Arrivals
    between_ms: tuple[float, ...]

    @cached_property
    def step_ms(self) -> float:
        """The time from one step to the next."""
        execution, tables = self.schedule.execution, self._tables()
        begin = [0.0] * self.schedule.placement.num_ranks
        firsts = []
        for _ in range(_STEPS_SIMULATED):
            ended = execution.run(tables, begin).ended
            begin = [end + between for end, between in zip(ended, self.between_ms, strict=True)]
            firsts.append(max(begin))
        return (firsts[-1] - firsts[-1 - _STEPS_AVERAGED]) / _STEPS_AVERAGED

    @property
    def bubble(self) -> float:
        """``1 - work / longest span`` of a step whose ranks begin together."""
        longest = float(self.schedule.execution.run(self._tables()).spans().max())
        work = self.work_ms()
        return 1 - sum(work) / len(work) / longest if longest else 0.0

    def work_ms(self) -> list[float]:
        """For each rank, the time that its actions take in a step."""
        placement = self.schedule.placement
        costs = self.costs.per_stage(placement.num_stages)
        per_stage = [
            sum(times) for times in zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
        ]
        return [
            self.schedule.num_microbatches * sum(per_stage[stage] for stage in placement.stages_of_rank(rank))
            for rank in range(placement.num_ranks)
        ]

    def with_schedule(self, schedule: Schedule) -> StepModel:
        """Under another schedule on the same placement."""
        changes_kind = schedule.splits_backward and not self.schedule.splits_backward
        arrivals = self.arrivals.with_early_ones(0.0) if changes_kind else self.arrivals
        return replace(self, schedule=schedule, arrivals=arrivals)

    def with_costs(self, costs: StageCosts) -> StepModel:
        """With other times of stages."""
        return replace(self, costs=costs)

    def without(self, waits_ms: Sequence[float]) -> StepModel:
        """With so much less between the steps of each rank."""
        between = tuple(max(0.0, ms - less) for ms, less in zip(self.between_ms, waits_ms, strict=True))
        return replace(self, between_ms=between)

    def _tables(self) -> CostTables:
        placement, num_stages = self.schedule.placement, self.schedule.placement.num_stages
        times = replace(self.costs, p2p=0.0, gather=0.0, reduce=0.0)
        nothing = (0.0,) * num_stages
        forward, backward = self.arrivals.forward, self.arrivals.backward
        latency = np.array(forward + backward + nothing + backward + 3 * nothing)
        return replace(CostTables.build(placement, times), latency=latency)


def scaled(costs: StageCosts, factor: float, fixed_ms: float, num_stages: int) -> StageCosts:
    """Costs of microbatches with ``factor`` times the rows, of whose actions ``fixed_ms`` stays what it is."""

    def of_kind(times: Sequence[float]) -> list[float]:
        return [min(fixed_ms, ms) + max(0.0, ms - fixed_ms) * factor for ms in times]

    known = costs.per_stage(num_stages)
    held_after_forward = [held * factor for held in known.held_after_forward]
    held_after_input = [held * factor for held in known.held_after_input]
    return replace(
        costs,
        forward=of_kind(known.forward),
        backward_input=of_kind(known.backward_input),
        backward_weight=of_kind(known.backward_weight),
        held_after_forward=held_after_forward,
        held_after_input=held_after_input,
    )
