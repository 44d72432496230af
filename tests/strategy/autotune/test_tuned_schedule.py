"""``schedule="auto"`` and CSV files in training: what is run when, what is measured, saved and said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning_utilities.core import rank_zero
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.schedule import Placement, Schedule, StageCosts, build_schedule
from lightning_pp.schedule.fewer_microbatches import keep_first_microbatches
from lightning_pp.schedule.offloading import with_offloading
from lightning_pp.schedule.simulation.costs_file import read_costs_file
from lightning_pp.strategy.autotune import measured_costs


class Programs(Callback):
    """Keeps the schedule of every training batch."""

    def __init__(self) -> None:
        self.schedules: list[Schedule] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.schedules.append(trainer.strategy.engine.last_training_step[0])


class Lengths(Blocks):
    """Samples are sequences; their length varies from batch to batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(-1)

    def train_dataloader(self) -> Any:
        lengths = (5, 3, 3, 5, 3, 3, 3, 5)
        return DataLoader([(torch.ones(4, length, 8), torch.ones(4)) for length in lengths], batch_size=None)


def run(options: dict[str, Any], module: type[Blocks] = Blocks, devices: int = 2, **run: Any) -> dict[str, Any]:
    """In a worker: trains, by default two epochs of batches of 5, 5 and 2 samples; tells what was run and said."""
    strategy = PipelineParallelStrategy(**options, check_first_batches=False)
    programs, lines = Programs(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    fit = trainer(devices, strategy, max_epochs=2, callbacks=[programs], **run)
    before = strategy.costs
    try:
        fit.fit(module(), *([] if module in (Lengths, Wide) else [loader(12, 5)]))
    finally:
        rank_zero.log.removeHandler(handler)
    return {
        "schedules": programs.schedules,
        "costs": (before, strategy.costs),
        "said": "\n".join(lines),
        "placement": strategy.engine.placement,
    }


def has_whole_backwards(schedule: Schedule) -> bool:
    return "B" in schedule.csv_text()


def test_every_rank_changes_before_the_same_batch(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "costs" / "measured.json"
    options = {"schedule": "auto", "num_profiled_batches": 2, "num_microbatches": 3, "save_costs": str(path)}
    first, second = pool.run(run, {"pipeline_parallel_size": 2, **options}, timeout=120)
    assert first["schedules"] == second["schedules"] and first["costs"] == second["costs"]
    schedules: list[Schedule] = first["schedules"]
    assert [schedule.num_microbatches for schedule in schedules] == [3, 3, 2, 3, 3, 2]  # of 5, 5 and 2 samples
    assert not any(map(has_whole_backwards, schedules[:4])), "I and W have to be measured apart"
    assert schedules[2] == keep_first_microbatches(schedules[0], 2)
    # from the fifth batch on: what the measured costs give, whoever computes it
    nothing, costs = first["costs"]
    assert nothing is None and StageCosts.from_json(path) == costs and costs.num_stages == 2
    held = costs.per_stage(2).held_after_forward
    expected = build_schedule(
        "auto",
        num_ranks=2,
        num_microbatches=3,
        costs=costs,
        placement=Placement.interleaved(2),
        memory_limit=[4 * held[0], 4 * held[1]],
    )
    assert schedules[4] == expected
    assert schedules[5] == keep_first_microbatches(expected, 2)
    for name in ("forward", "backward_input", "backward_weight", "held_after_forward", "held_after_input"):
        assert all(value > 0 for value in getattr(costs, name)), name
    # the first stage sends forward, the last one back
    resolved = costs.per_stage(2)
    assert resolved.p2p[0] == resolved.p2p_back[1] > 0 and resolved.p2p[1] == resolved.p2p_back[0] == 0
    assert second["said"] == "" or "schedule='auto'" not in second["said"]
    assert has_whole_backwards(schedules[4]), "what nobody waits for is not split"
    simulation = expected.simulate(costs)
    assert f"{max(simulation.span_ms):.4g}" in first["said"]
    for name in ("1f1b", "zb_h1", "zb_h2", "gpipe", "until now"):
        assert name in first["said"]
    content = read_costs_file(path)
    assert content.held_unit == "GiB"
    assert content.measured_on["num_ranks"] == 2 and content.measured_on["rank_of_stage"] == [0, 1]
    assert [unit for units in content.measured_on["stages"] for unit in units] == [
        *(f"blocks.{index}" for index in range(4)),
        "head",
    ]


@pytest.mark.nightly
def test_given_costs_count_from_the_first_batch(pool: WorkerPool, tmp_path: Path) -> None:
    costs = StageCosts([5.0, 9.0, 6.0, 7.0], 8.0, 4.0, p2p=0.5, held_after_forward=2.0, held_after_input=1.0)
    costs.to_json(tmp_path / "costs.json", held_unit="GiB", measured_on={"stages": [["blocks.0"], ["other"], [], []]})
    options = {
        "schedule": "auto",
        "pipeline_parallel_size": 2,
        "costs": str(tmp_path / "costs.json"),
        "num_microbatches": 3,
        "memory_limit_gib": 8.0,
    }
    first, second = pool.run(run, options, timeout=120)
    assert first["schedules"] == second["schedules"] and first["costs"] == (costs, costs)
    request: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 3, "costs": costs, "memory_limit": 8.0}
    expected = [
        build_schedule("auto", placement=placement, stages_per_rank=2, **request)
        for placement in (Placement.v_shaped(2), Placement.interleaved(2, 2))
    ]
    best = min(expected, key=lambda schedule: max(schedule.simulate(costs).span_ms))
    assert first["placement"] == best.placement
    assert first["schedules"][0] == first["schedules"][1] == best
    for schedule in first["schedules"]:
        schedule.validate(costs=costs, memory_limit=8.0)


class Wide(Blocks):
    """Blocks whose activations are worth a copy."""

    def __init__(self) -> None:
        super().__init__(8, 64)

    def train_dataloader(self) -> Any:
        return DataLoader([(torch.randn(256, 64), torch.randn(256)) for _ in range(2)], batch_size=None)


def num_offloads(schedule: Schedule) -> str:
    return ", ".join(str(line.count("OFFLOAD")) for line in schedule.csv_text().splitlines())


def test_copies_to_the_host_are_placed_by_measured_times(pool: WorkerPool) -> None:
    options = {"schedule": "gpipe", "num_profiled_batches": 1, "num_microbatches": 8, "activation_offload": True}
    first, second = pool.run(run, {"pipeline_parallel_size": 2, **options}, Wide, timeout=120)
    assert first["schedules"] == second["schedules"] and first["costs"] == second["costs"]
    nothing, costs = first["costs"]
    assert nothing is None and all(value > 0 for value in costs.held_on_host)
    by_name = build_schedule("gpipe", num_ranks=2, num_microbatches=8)
    assert first["schedules"][3] == with_offloading(by_name, costs)
    assert first["schedules"][3].offloads and first["schedules"][0].offloads
    assert "searches" not in first["said"] and "until now" not in first["said"]
    assert (
        f"of 8 microbatches, rank by rank, {num_offloads(first['schedules'][3])} now wait on the host" in first["said"]
    )


def test_costs_of_a_named_schedule_are_saved(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    options = {"schedule": "1f1b", "num_profiled_batches": 1, "num_microbatches": 2, "save_costs": str(path)}
    first, _ = pool.run(run, {"pipeline_parallel_size": 2, **options}, timeout=120)
    by_name = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert [has_whole_backwards(schedule) for schedule in first["schedules"]] == [False] * 3 + [True] * 3
    assert first["schedules"][3] == by_name
    assert StageCosts.from_json(path) == first["costs"][1]


def with_measured_bytes(options: dict[str, Any], after_forward: list[float]) -> dict[str, Any]:
    """In a worker: as :func:`run`, and the measurement finds that so much is held."""
    with mock.patch.object(measured_costs, "held_gib", return_value=(after_forward, [0.0, 0.0])):
        return run(options)


def test_goes_on_if_measured_bytes_leave_no_schedule(pool: WorkerPool) -> None:
    options = {
        "schedule": "auto",
        "pipeline_parallel_size": 2,
        "stages_per_rank": 1,
        "num_profiled_batches": 1,
        "num_microbatches": 2,
        "memory_limit_gib": 1.0,
    }
    with_warning = pool.run(with_measured_bytes, options, [1.0, 3.0], timeout=120)
    schedules = with_warning[0]["schedules"]
    assert len(schedules) == 6 and schedules[3] == schedules[5] and not has_whole_backwards(schedules[0])
    assert schedules == with_warning[1]["schedules"]


def test_costs_are_those_of_the_most_frequent_shape(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    options = {
        "schedule": "auto",
        "pipeline_parallel_size": 2,
        "num_profiled_batches": 4,
        "num_microbatches": 2,
        "save_costs": str(path),
    }
    pool.run(run, options, Lengths, timeout=120)  # measured: lengths 3, 5, 3, 3
    measured_on = read_costs_file(path).measured_on
    assert "(2, 3, 8)" in measured_on["microbatch"] and measured_on["samples_per_microbatch"] == 2


def test_the_schedule_of_a_file_is_what_runs(pool: WorkerPool, tmp_path: Path) -> None:
    """Stages where no family puts them: rank 0 has the first, third and fourth of four."""
    path = tmp_path / "mine.csv"
    path.write_text(
        "0F0,0F1,2F0,3F0,3I0,2I0,2F1,3F1,3B1,2B1,3W0,2W0,0B0,0F2,2F2,3F2,3B2,2B2,0B1,0B2\n1F0,1F1,1I0,1F2,1W0,1B1,1B2\n"
    )
    options = {"schedule": str(path), "pipeline_parallel_size": 2}
    first, second = pool.run(run, options, timeout=120)
    mine = Schedule.from_csv(path)
    assert first["schedules"][:2] == [mine, mine] and first["placement"].rank_of_stage == (0, 1, 0, 0)
    assert first["schedules"][2] == keep_first_microbatches(mine, 2) == second["schedules"][2]
    assert first["costs"] == (None, None)


@pytest.mark.parametrize("options", [{"device_memory_gib": 1.0}, {"stages_per_rank": 2}])
def test_one_rank(pool: WorkerPool, options: dict[str, Any]) -> None:
    settings = {"schedule": "auto", "num_microbatches": 2, "num_profiled_batches": 1, **options}
    (only,) = pool.run(run, settings, Blocks, 1, world_size=1, timeout=120)
    assert only["costs"][1].num_stages == options.get("stages_per_rank", 1) and len(only["schedules"]) == 6
