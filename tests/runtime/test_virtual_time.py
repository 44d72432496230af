"""The runtime runs a schedule in just the time that the simulator says, for random schedules, sizes and costs."""

from __future__ import annotations

import random

import pytest
from pool import WorkerPool
from virtual_time import run_in_virtual_time

from lightning_pp.schedule import Schedule, StageCosts, available_schedules, build_schedule
from lightning_pp.schedule.registry import schedule_family


def random_cases(seed: int) -> list[tuple[Schedule, StageCosts]]:
    """One of every family, with uneven costs; sizes that divide nothing."""
    generator = random.Random(seed)
    cases = []
    for name in available_schedules():
        family = schedule_family(name)
        p = generator.randint(2, 4)
        v = generator.choice([number for number in (1, 2) if family.allows(number)])
        m = generator.randint(1, 4 if name == "auto" else 9)

        def numbers(num_stages: int = p * v) -> list[float]:
            return [round(generator.uniform(0.1, 9.0), 2) for _ in range(num_stages)]

        costs = StageCosts(numbers(), numbers(), numbers(), p2p=generator.choice([0.0, 0.3, 4.0]))
        cases.append((build_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v, costs=costs), costs))
    return cases


def check(pool: WorkerPool, seed: int) -> None:
    cases = random_cases(seed)
    by_rank = pool.run(run_in_virtual_time, cases, world_size=4, process_group=True, timeout=120.0)
    for index, (schedule, costs) in enumerate(cases):
        for rank, row in enumerate(schedule.simulate(costs).timeline):
            expected = {str(cell.action): (cell.start_ms, cell.end_ms) for cell in row}
            found = by_rank[rank][index]
            assert list(found) == list(expected), schedule.name  # in the order of the program
            for action, times in expected.items():
                assert found[action] == pytest.approx(times, abs=1e-9), (schedule.name, action)


def test_the_runtime_takes_the_simulated_time(pool: WorkerPool) -> None:
    check(pool, seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 13))
def test_more_of_them(pool: WorkerPool, seed: int) -> None:
    check(pool, seed)
