"""Where a model is cut when the costs of its units are known, against trying every cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
import torch
from layouts import choose_layout
from one_process import record_of
from torch import Tensor, nn

from lightning_pp.planning.cuts import CutOptions, best_partition, measured_unit_costs
from lightning_pp.planning.schedules.given_costs import GivenCosts
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.tuning import LayoutRequest
from lightning_pp.schedule import Placement, Schedule, StageCosts, build_schedule
from lightning_pp.split.cut.moved_cuts import moved_partitions
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.cut.unit_costs import UnitCost, stage_costs
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.unit_calls.units import discover_units

NUM_BLOCKS = 9


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(8, 24)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(batch))).square().mean()


@pytest.fixture(scope="module")
def recorded() -> tuple[StepRecord, dict[str, int]]:
    module = Stack()
    units = discover_units(module)
    record = record_of(module, torch.randint(0, 24, (2, 5)))
    return record, {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}


def costs_of(record: StepRecord, seed: int) -> dict[str, UnitCost]:
    generator = torch.Generator().manual_seed(seed)
    return {
        unit: UnitCost(*(float(x) for x in torch.rand(3, generator=generator) + 0.2)) for unit in record.first_calls()
    }


def step_time(program: Schedule, costs: dict[str, UnitCost], stage_of_unit: dict[str, int]) -> float:
    speeds = [1.0] * program.placement.num_stages
    return max(program.simulate(stage_costs(costs, stage_of_unit, speeds)).span_ms)


@pytest.mark.by_day(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 3), ("zb_h1", 2), ("zb_v", 2), ("interleaved_1f1b", 2)])
def test_the_step_is_as_short_as_that_of_the_best_of_all_cuts(
    recorded: tuple[StepRecord, dict[str, int]], name: str, num_ranks: int, seed: int
) -> None:
    record, num_parameters = recorded
    program = build_schedule(name, num_ranks=num_ranks, num_microbatches=6)
    placement, costs, order = program.placement, costs_of(record, seed), list(record.first_calls())
    partition = best_partition(record, num_parameters, placement, CutOptions(), costs=costs, program=program)
    found = step_time(program, costs, dict(partition.stage_of_unit))
    best = min(
        step_time(program, costs, {unit: sum(index >= cut for cut in cuts) for index, unit in enumerate(order)})
        for cuts in combinations(range(1, len(order)), placement.num_stages - 1)
    )
    assert found <= best * 1.05


def neighbours(order: Sequence[str], cuts: Sequence[int]) -> Iterator[list[int]]:
    """Cuts with some in a row one further up or down, written out one by one."""
    for length in range(1, len(cuts) + 1):
        for first in range(len(cuts) - length + 1):
            for step in (-1, 1):
                moved = [cut + step * (first <= number < first + length) for number, cut in enumerate(cuts)]
                if all(start < stop for start, stop in pairwise([0, *moved, len(order)])):
                    yield moved


def stages_of(order: Sequence[str], cuts: Sequence[int]) -> dict[str, int]:
    return {unit: sum(index >= cut for cut in cuts) for index, unit in enumerate(order)}


def test_moved_cuts_are_all_runs_of_cuts_up_and_down(recorded: tuple[StepRecord, dict[str, int]]) -> None:
    record, _ = recorded
    order = list(record.first_calls())
    for cuts in ([3, 6, 9], [1, 2, 10], [5]):
        partition = Partition(len(cuts) + 1, {**stages_of(order, cuts), "not called": 1}, {})
        found = [dict(moved.stage_of_unit) for moved in moved_partitions(record, partition)]
        assert found == [{**stages_of(order, moved), "not called": 1} for moved in neighbours(order, cuts)]


def test_given_costs_of_other_stages_are_shared_out_among_the_units(
    recorded: tuple[StepRecord, dict[str, int]],
) -> None:
    record, num_parameters = recorded
    order = list(record.first_calls())
    # measured with one block on the first stage, which took as long as nine units on the second
    stages = [order[:2], order[2:]]
    given = GivenCosts(StageCosts([9.0, 9.0], [9.0, 9.0], [9.0, 9.0]), units=stages, ranks=[0, 1])
    options = ScheduleOptions(schedule_source("1f1b"), costs=given)
    units = measured_unit_costs(record, num_parameters, given, CutOptions())
    assert units is not None
    assert sum(units[unit].total for unit in stages[0]) == pytest.approx(27.0)
    layout = choose_layout(record, num_parameters, LayoutRequest(options, 3, 6, CutOptions(), "cpu"))
    assert layout.placement == Placement.interleaved(3)
    resolved = layout.costs.per_stage(3)
    total = sum(resolved.forward) + sum(resolved.backward_input) + sum(resolved.backward_weight)
    assert total == pytest.approx(54.0)
    # the costly block is by itself, as far as cuts allow
    assert set(layout.partition.units_of_stage(0)) <= set(order[:2])


def test_a_slow_rank_gets_fewer_units(recorded: tuple[StepRecord, dict[str, int]]) -> None:
    record, num_parameters = recorded
    costs = {unit: UnitCost(1.0, 1.0, 1.0) for unit in record.first_calls()}
    program = build_schedule("zb_v", num_ranks=2, num_microbatches=6)

    def units_of_rank(cut: CutOptions) -> list[int]:
        partition: Partition = best_partition(
            record, num_parameters, program.placement, cut, costs=costs, program=program
        )
        sizes = [len(partition.units_of_stage(stage)) for stage in range(4)]
        return [sizes[0] + sizes[3], sizes[1] + sizes[2]]

    even, uneven = units_of_rank(CutOptions()), units_of_rank(CutOptions(rank_speeds=[1.0, 2.0]))
    assert sum(even) == sum(uneven) == NUM_BLOCKS + 2
    assert abs(even[0] - even[1]) <= 1
    assert uneven[1] in (7, 8)
