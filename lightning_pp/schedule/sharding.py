"""Puts UNSHARD, RESHARD and REDUCE into any program.

====================  ==================================================================================================
mode                  what is inserted
====================  ==================================================================================================
``replicate``         REDUCE right after the last W of a stage
``shard_grad_op``     UNSHARD of every stage at the start, in the order of first use; RESHARD after its last F, I or B
``full_shard``        UNSHARD ahead of each window of uses and RESHARD after it, so that what is gathered at any time
                      stays within a budget (:mod:`lightning_pp.schedule.gathering`)
====================  ==================================================================================================

The sharding modes reduce as ``replicate`` does. W uses no gathered parameters, so no window reaches to it.

Where whole stages do not fit the budget, or would be gathered much too often, a rank gathers unit by unit inside F, I
and B instead (:func:`unit_plan`): first to last in F, last to first in I and B. Its UNSHARD and RESHARD then only mark
the windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule.gathering import MOST_EXTRA_GATHERS, GatherPlan, fewest_gathers, plan_gathers
from lightning_pp.schedule.merging import split_at
from lightning_pp.schedule.program.action import USES_PARAMETERS, Action, ActionKind
from lightning_pp.schedule.program.coded import UNSHARD, B, W
from lightning_pp.schedule.schedule import Schedule

ShardingMode = Literal["replicate", "shard_grad_op", "full_shard"]
SHARDING_MODES: tuple[ShardingMode, ...] = get_args(ShardingMode)

_ENDS_GRADIENTS = (ActionKind.W, ActionKind.B)


@dataclass(frozen=True)
class Sharding:
    """The sharded units, their sizes, and the budget for gathered parameters.

    Attributes:
        mode: See the module.
        stages: For each stage, the units in the order of their calls; a unit called twice stands there twice. Units
            that can only be gathered together have one name.
        num_bytes: What each of these names takes when gathered.
        budget: With ``full_shard``, the most bytes that a rank may have gathered at any time; None chooses, see
            :meth:`budget_of`.
    """

    mode: ShardingMode
    stages: tuple[tuple[str, ...], ...]
    num_bytes: Mapping[str, int]
    budget: int | None = None

    def stage_bytes(self, stage: int) -> int:
        """What the stage takes when gathered."""
        return sum(self.num_bytes[unit] for unit in set(self.stages[stage]))

    def budget_of(self, stages: Sequence[int]) -> int:
        """The budget of a rank that holds ``stages``.

        By default two stages (the one in use, and the next), but no more than half of what the rank holds, and no less
        than two units.
        """
        if self.budget is not None:
            return self.budget
        units = {unit for stage in stages for unit in self.stages[stage]}
        two_units = sum(sorted((self.num_bytes[unit] for unit in units), reverse=True)[:2])
        two_stages = sum(sorted(map(self.stage_bytes, stages), reverse=True)[:2])
        half = -(-sum(self.num_bytes[unit] for unit in units) // 2)
        return max(two_units, min(two_stages, half))

    def check(self) -> None:
        """Raises :class:`ConfigurationError` if a unit does not fit the budget."""
        if self.budget is None or self.mode != "full_shard" or not self.num_bytes:
            return
        unit, largest = max(self.num_bytes.items(), key=lambda item: item[1])
        if largest > self.budget:
            raise ConfigurationError(
                f"unshard_budget={self.budget} bytes is too small: unit {unit} takes {largest} bytes when gathered. "
                f"Give at least {largest}, or twice as much to gather the next unit while one is in use. Or name "
                "smaller units with units=..."
            )


@dataclass(frozen=True)
class ActionUses:
    """The place of one action among the uses of a :class:`UnitPlan`.

    Attributes:
        first: Its first use, or that of the next action that has one.
        end: One past its last use.
        following: The first use after the action; no more than the steps up to it may be done when the action ends.
    """

    first: int
    end: int
    following: int


@dataclass(frozen=True)
class UnitPlan:
    """Gathers and frees of one rank that gathers unit by unit.

    Attributes:
        gathers: Over all uses of units in the program.
        uses_of: For each F, I, W, B and REDUCE of the program, its uses.
        budget: The most bytes to have gathered at any time, gathers under way included.
    """

    gathers: GatherPlan[str]
    uses_of: Mapping[Action, ActionUses]
    budget: int


def insert_sharding(schedule: Schedule, sharding: Sharding, *, reduces: bool = True) -> Schedule:
    """Puts the sharding actions of ``sharding`` into ``schedule``, instead of any that it has.

    If the last backward of a stage is a B, it becomes I and W, so that the stage's units are reduced one by one in W.

    Args:
        schedule: Legal programs.
        sharding: For as many stages as the schedule has.
        reduces: False for a batch that only accumulates: nothing is reduced, and what ``shard_grad_op`` has gathered
            stays for the next batch.

    Raises:
        ConfigurationError: A unit does not fit the budget.
    """
    sharding.check()
    programs: list[tuple[Action, ...]] = []
    for rank, program in enumerate((with_last_split(schedule) if reduces else schedule).programs):
        actions = [action for action in program if action.kind.has_microbatch]
        if sharding.mode != "replicate":
            plan, _ = _plan_of_stages(actions, sharding, schedule.placement.stages_of_rank(rank))
            actions = _with_windows(actions, plan, keeps=not reduces and sharding.mode == "shard_grad_op")
        programs.append(tuple(_with_reductions(actions) if reduces else actions))
    return replace(schedule, programs=tuple(programs))


def unit_plan(schedule: Schedule, sharding: Sharding, rank: int) -> UnitPlan | None:
    """How a rank gathers unit by unit; None if it gathers whole stages.

    Args:
        schedule: As :func:`insert_sharding` has made it, with all its microbatches.
        sharding: What it was made for.
        rank: The rank.
    """
    program, stages = schedule.programs[rank], schedule.placement.stages_of_rank(rank)
    if sharding.mode != "full_shard" or not _plan_of_stages(program, sharding, stages)[1]:
        return None
    budget = sharding.budget_of(stages)
    gathers = plan_gathers(
        [unit for _, units in unit_uses(program, sharding) for unit in units], sharding.num_bytes, budget
    )
    return UnitPlan(gathers, _uses_of_actions(gathers, program, sharding), budget)


def with_last_split(schedule: Schedule) -> Schedule:
    """``schedule`` without sharding actions, with the last backward of each stage as I and W.

    But under ``full_shard`` it is simulated as what :func:`insert_sharding` makes of it: whoever simulates a program
    without UNSHARD and REDUCE gathers each stage from the start of the step and reduces it after its last W.
    """
    programs = []
    for program in schedule.coded:
        computing = program.below(UNSHARD)
        kinds, stages, _ = computing.parts()
        ends = np.flatnonzero((kinds == W) | (kinds == B))[::-1]
        last = ends[np.unique(stages[ends], return_index=True)[1]]
        programs.append(split_at(computing, np.sort(last[kinds[last] == B])))
    return replace(schedule, programs=tuple(programs))


def unit_uses(program: Sequence[Action], sharding: Sharding) -> Iterator[tuple[Action, tuple[str, ...]]]:
    """The actions that use gathered parameters, each with its units in the order of use."""
    for action in program:
        if action.kind in USES_PARAMETERS:
            units = sharding.stages[action.stage]
            yield action, units if action.kind is ActionKind.F else units[::-1]


def _plan_of_stages(
    program: Sequence[Action], sharding: Sharding, stages: Sequence[int]
) -> tuple[GatherPlan[int], bool]:
    """When one rank gathers and frees its stages, and whether it gathers their units one by one meanwhile."""
    stage_uses = [action.stage for action in program if action.kind in USES_PARAMETERS]
    stage_bytes = {stage: sharding.stage_bytes(stage) for stage in dict.fromkeys(stage_uses)}
    if sharding.mode == "shard_grad_op":
        return plan_gathers(stage_uses, stage_bytes, sum(stage_bytes.values())), False
    budget = sharding.budget_of(stages)
    if all(size <= budget for size in stage_bytes.values()):
        uses = [unit for _, units in unit_uses(program, sharding) for unit in units]
        plan = plan_gathers(stage_uses, stage_bytes, budget)
        num_gathers = sum(len(set(sharding.stages[stage])) for step in plan.steps for stage in step.gathers)
        if num_gathers <= MOST_EXTRA_GATHERS * fewest_gathers(uses, sharding.num_bytes, budget):
            return plan, False
    return plan_gathers(stage_uses, stage_bytes, max(stage_bytes.values(), default=0)), True


def _with_windows(compute: Sequence[Action], plan: GatherPlan[int], *, keeps: bool) -> list[Action]:
    """Puts the steps of ``plan`` into a program: each right after the last action of the use before it."""
    found: list[Action] = []
    num_uses = 0

    def put(step: int) -> None:
        if not keeps:
            found.extend(Action(stage, ActionKind.RESHARD) for stage in plan.steps[step].frees)
        found.extend(Action(stage, ActionKind.UNSHARD) for stage in plan.steps[step].gathers)

    put(0)
    last_action = {}
    for cell, action in enumerate(compute):
        if action.kind in USES_PARAMETERS:
            if num_uses == 0 or plan.uses[num_uses - 1] != action.stage:
                num_uses += 1
            last_action[num_uses] = cell
    step_after = {cell: use for use, cell in last_action.items()}
    for cell, action in enumerate(compute):
        found.append(action)
        if cell in step_after:
            put(step_after[cell])
    return found


def _with_reductions(program: Sequence[Action]) -> list[Action]:
    """Puts REDUCE right after the last W or B of each stage."""
    last = {action.stage: cell for cell, action in enumerate(program) if action.kind in _ENDS_GRADIENTS}
    found: list[Action] = []
    for cell, action in enumerate(program):
        found.append(action)
        if last.get(action.stage) == cell:
            found.append(Action(action.stage, ActionKind.REDUCE))
    return found


def _uses_of_actions(plan: GatherPlan[str], program: Sequence[Action], sharding: Sharding) -> dict[Action, ActionUses]:
    """Finds the uses of each action in the plan, where a unit that follows itself is one use, over actions too."""
    units_of = dict(unit_uses(program, sharding))
    placed = [action for action in program if action.kind not in (ActionKind.UNSHARD, ActionKind.RESHARD)]
    spans: list[tuple[int, int] | None] = []
    num_uses = 0
    for action in placed:
        units = units_of.get(action, ())
        first = num_uses
        for index, unit in enumerate(units):
            if num_uses and plan.uses[num_uses - 1] == unit:
                first -= index == 0
            else:
                num_uses += 1
        spans.append((first, num_uses) if units else None)
    assert num_uses == len(plan.uses)
    uses_of: dict[Action, ActionUses] = {}
    following = len(plan.uses)
    for action, span in zip(reversed(placed), reversed(spans), strict=True):
        first, end = span or (following, following)
        uses_of[action] = ActionUses(first, end, following)
        following = first
    return uses_of
