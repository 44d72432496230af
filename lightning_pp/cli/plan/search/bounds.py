"""Lower bounds for a plan's time and memory, without a cut: they leave out plans that are not worth one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_pp.cli.plan.costs import Costs
from lightning_pp.errors import ScheduleError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.model_cutter import Cut
from lightning_pp.planning.stage_model import RecordedModel, assign_stages
from lightning_pp.schedule import Placement, Schedule
from lightning_pp.schedule.merging import merge_first_stage
from lightning_pp.schedule.program.coded import B, F, I, W
from lightning_pp.schedule.registry import ScheduleRequest, schedule_family
from lightning_pp.split.cut.partition import Partition, inseparable_groups, partition_units
from lightning_pp.split.cut.unit_costs import estimate_unit_costs, weighted
from lightning_pp.split.memory.activation_memory import least_held
from lightning_pp.split.memory.state_memory import ParameterSize

Numbers = npt.NDArray[np.float64]
Held = npt.NDArray[np.int64]
ONE_MICROBATCH: Held = np.array([[1, 0]])
"""What any rank holds at some time."""

# for sums of many numbers, so that rounding leaves out nothing
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)  # each is a key of its own
class Blocks:
    """Blocks of units; cuts are allowed between blocks.

    Attributes:
        milliseconds: Of F, of I and of W of one microbatch. Shape (3, n).
        held: Bytes of one microbatch from F to I, and from I to W. Shape (2, n).
        parameters: Those of each block, as on one stage; one that several share is with the first. Length n.
    """

    milliseconds: Numbers
    held: Numbers
    parameters: Sequence[Sequence[ParameterSize]]

    @classmethod
    def of(cls, recording: RecordedModel, costs: Costs, wishes: CutOptions) -> Blocks:
        """Those of a recorded step.

        Args:
            recording: The step.
            costs: What stages cost, in milliseconds.
            wishes: What the user says of the cuts, and the device they are for.
        """
        groups, counted = inseparable_groups(recording.record), recording.counted
        one = Placement.interleaved(1)
        estimated = estimate_unit_costs(counted.record, counted.num_parameters, wishes.flops_per_byte)
        whole = partition_units(
            recording.record,
            placement=one,
            num_parameters=recording.num_parameters,
            costs=weighted(estimated, wishes.unit_weights or {}),
        )
        block_of_unit = {unit: index for index, group in enumerate(groups) for unit in group}
        split = assign_stages(recording, placement=one, partition=whole)
        parameters: list[list[ParameterSize]] = [[] for _ in groups]
        for parameter in split.parameter_sizes:
            if parameter.unit in block_of_unit:
                parameters[block_of_unit[parameter.unit]].append(replace(parameter, stages=(0,)))
        held = np.zeros((2, len(groups)))
        for unit, num_bytes in least_held(counted.record).items():
            held[:, block_of_unit[unit]] += num_bytes
        apart = Partition(len(groups), {**whole.stage_of_unit, **block_of_unit}, whole.unit_costs)
        cut = Cut(replace(split, partition=apart, placement=Placement.interleaved(1, len(groups))), is_measured=False)
        nothing = [0.0] * len(groups)
        stages = costs.of(cut, (), nothing, nothing).per_stage(len(groups))
        times = np.array([stages.forward, stages.backward_input, stages.backward_weight])
        return cls(times, held, parameters)

    def longest_work(self, num_ranks: int) -> float:
        """The least time of a microbatch on the rank that has most of it, milliseconds.

        That rank has no less than the mean; and of the ``k * num_ranks + 1`` largest blocks some rank has ``k + 1``.
        """
        falling = np.sort(self.milliseconds.sum(axis=0))[::-1]
        total = np.concatenate(([0.0], np.cumsum(falling)))
        least = total[-1] / num_ranks
        for k in range((len(falling) - 1) // num_ranks + 1):
            last = k * num_ranks + 1
            least = max(least, total[last] - total[last - k - 1])
        return float(least) * (1 - _ROUNDING)

    @cached_property
    def work(self) -> float:
        """Milliseconds of a microbatch on one rank."""
        return float(self.milliseconds.sum())

    def state(self, model: MemoryModel) -> Numbers:
        """Bytes of each block, whatever runs: parameters, gradients, the optimizer's state. Shape (n)."""
        sizes, found = model.state, []
        for own in self.parameters:
            state = sizes.of(own, [0])
            is_window = sizes.sharding == "full_shard"  # of a few units, however many there are
            found.append(state.total_bytes - (state.gathered_parameters_bytes if is_window else 0))
        return np.array(found, dtype=float)

    def can_fit(self, state: Numbers, num_held: Sequence[Held], limit_bytes: float) -> bool:
        """Whether ranks that hold so many microbatches may have room for all blocks.

        No if all ranks together have not, if one block is too large, or if the ranks cannot hold as many blocks as
        there are, though each had the smallest.

        Args:
            state: As :meth:`state` says.
            num_held: For each rank, microbatches that it holds of all its blocks at one time or another.
            limit_bytes: Of each rank.
        """
        return self.least_need(state, num_held) <= limit_bytes * (1 + _ROUNDING)

    def about_need(self, state: Numbers, sums_held: Sequence[Held], num_stages: int) -> float:
        """What the fullest rank holds if no rank has less than its share of blocks, rounded down.

        Args:
            state: As :meth:`state` says.
            sums_held: For each rank, microbatches that it holds at one time or another, added over its stages.
            num_stages: Of all ranks.
        """
        num_ranks = len(sums_held)
        share = len(state) // num_ranks / len(state)
        most = max(float((numbers @ self.held.sum(axis=1)).max()) for numbers in sums_held)
        return share * (float(state.sum()) + most * num_ranks / num_stages)

    def least_need(self, state: Numbers, num_held: Sequence[Held]) -> float:
        """The least limit by which :meth:`can_fit` says yes."""
        # what microbatches of each block hold on each rank when all blocks there would hold most, shape (p, n)
        totals = self.held.sum(axis=1)
        held = np.array([numbers[np.argmax(numbers @ totals)] for numbers in num_held]) @ self.held
        of_blocks, last = state + held, len(state) - 1
        least, growing = of_blocks.min(axis=0), np.cumsum(np.sort(of_blocks), axis=1)
        return float(max(least.sum() / len(num_held), least.max(), np.partition(growing, last, axis=None)[last]))


class _Untouched:
    """Stands for costs, and raises an error if code reads them."""

    def __getattribute__(self, name: str) -> Any:
        raise _LooksAtCostsError


class _LooksAtCostsError(Exception):
    """The schedule depends on costs."""


def patterns_of(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[Schedule]:
    """The schedules that ``name`` chooses from by the costs, or fits to them; none where they are not known."""
    family = schedule_family(name)
    if not family.allows(stages_per_rank) or family.is_search:
        return []
    costs: Any = _Untouched()
    request = ScheduleRequest(num_ranks, num_microbatches, stages_per_rank, costs, None)
    try:
        found = [family.build(request)] if family.patterns is None else family.patterns(request)
    except (_LooksAtCostsError, ScheduleError):
        return []
    return [merge_first_stage(one) for one in found]


def microbatches_held(schedule: Schedule, of_stages: Callable[..., Any] = np.min) -> list[Held]:
    """For each rank, the microbatches that it holds of all its stages: between F and I, and between I and W.

    An array for each rank, of shape (number of different pairs, 2). ``np.sum`` for ``of_stages`` adds those of each.
    """
    found = []
    for rank, program in enumerate(schedule.coded):
        kinds, stages, _ = program.parts()
        saved = np.where(kinds == F, 1, np.where((kinds == I) | (kinds == B), -1, 0))
        queued = np.where(kinds == I, 1, np.where(kinds == W, -1, 0))
        own = schedule.placement.stages_of_rank(rank)
        held = [[np.cumsum(np.where(stages == stage, steps, 0)) for steps in (saved, queued)] for stage in own]
        found.append(np.unique(of_stages(held, axis=0), axis=1).T)
    return found


def least_span(
    work: float, longest_work: float, num_ranks: int, num_microbatches: int, program: Schedule | None
) -> float:
    """No step in a row is shorter, milliseconds.

    A rank works through its microbatches. With one stage a rank and whole backwards, the first rank also waits for the
    first forward to come to any stage, and for the last backward to come back from there: with T(s) the time of a
    microbatch on stage s, it spends ``T(0) + ... + T(s - 1) + m T(s)``. The cut that makes the largest of these least
    makes all equal, to ``T / (1 - (1 - 1 / m) ** p)`` for T in all.

    Args:
        work: Of one microbatch on all stages.
        longest_work: Of one microbatch on the rank that has most of it.
        num_ranks: Of the pipeline, p.
        num_microbatches: Of a step, m.
        program: The schedule, if it is known; else None.
    """
    least = num_microbatches * longest_work
    if program is None or program.placement.num_stages != num_ranks or program.splits_backward:
        return least
    return max(least, work / (1 - (1 - 1 / num_microbatches) ** num_ranks) * (1 - _ROUNDING))
