"""What a plan takes and holds at the least, known before the model is cut: it leaves out what is not worth a cut."""

from __future__ import annotations

from collections.abc import Sequence
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
from lightning_pp.schedule.program.coded import B, F, I
from lightning_pp.schedule.registry import ScheduleRequest, schedule_family
from lightning_pp.split.cut.partition import Partition, inseparable_groups, partition_units
from lightning_pp.split.cut.unit_costs import estimate_unit_costs, weighted
from lightning_pp.split.memory.activation_memory import least_held
from lightning_pp.split.memory.state_memory import ParameterSize

Numbers = npt.NDArray[np.float64]

# for sums of many numbers, so that rounding leaves out nothing
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Blocks:
    """What can be on one stage or another: units that may be cut between, each by itself.

    Attributes:
        milliseconds: Of F, I and W of one microbatch. Shape (n).
        held: Bytes of one microbatch from F to I. Shape (n).
        parameters: Those of each block; one that several share is with the first. Length n.
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
        for parameter in split.parameter_sizes():
            if parameter.unit in block_of_unit:
                parameters[block_of_unit[parameter.unit]].append(parameter)
        held = np.zeros(len(groups))
        for unit, num_bytes in least_held(counted.record).items():
            held[block_of_unit[unit]] += num_bytes
        apart = Partition(len(groups), {**whole.stage_of_unit, **block_of_unit}, whole.unit_costs)
        cut = Cut(replace(split, partition=apart, placement=Placement.interleaved(1, len(groups))), is_measured=False)
        nothing = [0.0] * len(groups)
        stages = costs.of(cut, (), nothing, nothing).per_stage(len(groups))
        times = np.sum([stages.forward, stages.backward_input, stages.backward_weight], axis=0)
        return cls(times, held, parameters)

    def longest_work(self, num_ranks: int) -> float:
        """The least time of a microbatch on the rank that has most of it, milliseconds.

        That rank has no less than the mean; and of the ``k * num_ranks + 1`` largest blocks some rank has ``k + 1``.
        """
        falling = np.sort(self.milliseconds)[::-1]
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
            state = sizes.of([replace(parameter, stages=(0,)) for parameter in own], [0])
            is_window = sizes.sharding == "full_shard"  # of a few units, however many there are
            found.append(state.total_bytes - (state.gathered_parameters_bytes if is_window else 0))
        return np.array(found, dtype=float)

    def can_fit(self, state: Numbers, num_held: Sequence[int], limit_bytes: float) -> bool:
        """Whether ranks that hold so many microbatches may have room for all blocks.

        No if all ranks together have not, if one block is too large, or if the ranks cannot hold as many blocks as
        there are, though each had the smallest.

        Args:
            state: As :meth:`state` says.
            num_held: For each rank, microbatches that it holds of all its blocks at one time.
            limit_bytes: Of each rank.
        """
        limit, room = limit_bytes * (1 + _ROUNDING), 0
        least = state + min(num_held) * self.held
        if least.sum() > len(num_held) * limit or least.max() > limit:
            return False
        for number in num_held:
            growing = np.cumsum(np.sort(state + number * self.held))
            room += int(np.searchsorted(growing, limit, side="right"))
        return room >= len(state)

    def least_need(self, state: Numbers, num_held: Sequence[int]) -> float:
        """The least limit by which :meth:`can_fit` says yes, to within a thousandth below."""
        low, high = 0.0, float(np.sum(state + max(num_held) * self.held))
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.can_fit(state, num_held, middle) else (middle, high)
        return low


class _Untouched:
    """In the place of costs: who looks at them is found out."""

    def __getattribute__(self, name: str) -> Any:
        raise _LooksAtCostsError


class _LooksAtCostsError(Exception):
    """The schedule depends on costs."""


def fixed_program(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule | None:
    """A schedule that is the same for all costs; None if ``name`` has none such for these sizes."""
    family = schedule_family(name)
    if not family.allows(stages_per_rank) or family.is_search:
        return None
    costs: Any = _Untouched()
    try:
        return family.build(ScheduleRequest(num_ranks, num_microbatches, stages_per_rank, costs, None))
    except (_LooksAtCostsError, ScheduleError):
        return None


def microbatches_held(schedule: Schedule) -> list[int]:
    """For each rank, the most microbatches that it holds of all its stages at one time, between F and I or B."""
    found = []
    for rank, program in enumerate(schedule.coded):
        kinds, stages, _ = program.parts()
        steps = np.where(kinds == F, 1, np.where((kinds == I) | (kinds == B), -1, 0))
        held = [np.cumsum(np.where(stages == own, steps, 0)) for own in schedule.placement.stages_of_rank(rank)]
        found.append(int(np.min(held, axis=0).max()))
    return found


def has_whole_backwards(schedule: Schedule) -> bool:
    """Whether every backward is a B, which tells the stage before only when its weight gradient is done."""
    return all(bool(np.isin(program.parts()[0], (F, B)).all()) for program in schedule.coded)


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
    is_chain = program is not None and program.placement.num_stages == num_ranks
    if program is not None and is_chain and has_whole_backwards(program):
        least = max(least, work / (1 - (1 - 1 / num_microbatches) ** num_ranks) * (1 - _ROUNDING))
    return least
