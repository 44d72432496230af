"""Lower bounds for a plan's time and memory, without a cut: they leave out plans that are not worth one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_pp.cli.plan.costs import Costs
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.model_cutter import Cut
from lightning_pp.planning.stage_model import RecordedModel, assign_stages
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.partition import Partition, inseparable_groups, partition_units
from lightning_pp.split.cut.unit_costs import estimate_unit_costs, weighted
from lightning_pp.split.memory.activation_memory import least_held
from lightning_pp.split.memory.state_memory import ParameterSize

Numbers = npt.NDArray[np.float64]

# for sums of many numbers, so that rounding leaves out nothing
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)  # each is a key of its own
class Blocks:
    """Blocks of units; cuts are allowed between blocks.

    Attributes:
        milliseconds: Of F, of I and of W of one microbatch. Shape (3, n).
        held: Bytes of one microbatch from F to I. Length n.
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
        held = np.zeros(len(groups))
        for unit, num_bytes in least_held(counted.record).items():
            held[block_of_unit[unit]] += num_bytes
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

    def state(self, model: MemoryModel) -> Numbers:
        """Bytes of each block, whatever runs: parameters, gradients, the optimizer's state. Shape (n)."""
        sizes, found = model.state, []
        for own in self.parameters:
            state = sizes.of(own, [0])
            is_window = sizes.sharding == "full_shard"  # of a few units, however many there are
            found.append(state.total_bytes - (state.gathered_parameters_bytes if is_window else 0))
        return np.array(found, dtype=float)

    def least_need(self, state: Numbers, num_ranks: int) -> float:
        """The least that the fullest of ``num_ranks`` ranks holds, whatever the cut and the schedule, bytes.

        Some rank holds no less than the mean of all, than the largest block, and than the smallest blocks together of
        which it has at least its share. Each rank holds one microbatch of all its blocks at some time.

        Args:
            state: As :meth:`state` says.
            num_ranks: Of the pipeline.
        """
        blocks = state + self.held
        growing, share = np.cumsum(np.sort(blocks)), -(-len(blocks) // num_ranks)
        return float(max(blocks.sum() / num_ranks, blocks.max(), growing[share - 1])) * (1 - _ROUNDING)
