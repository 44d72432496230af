"""``whole_batch_loss`` as an argument of the strategy: the order that is trained with, what is held, what is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from layouts import choose_layout, recorded_training
from pool import WorkerPool
from test_tuned_schedule import run as run_and_tell
from torch import Tensor, nn

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError, ScheduleError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.planning.stage_model import RecordedModel
from lightning_pp.planning.tuning import Layout, LayoutRequest
from lightning_pp.schedule import Schedule, build_schedule
from lightning_pp.split.memory.state_memory import StepDtypes

GIB = 2.0**30
NUM_SAMPLES, WIDTH, NUM_BLOCKS = 2, 16, 6
CSV = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1I0,1F1,1W0,1B1,1F2,1B2\n"


# ---------------------------------------------------------------- in training


def run(options: dict[str, Any], devices: int = 2) -> tuple[list[Schedule], str]:
    """In a worker: trains two epochs of batches of 5, 5 and 2 samples; the schedules, and what was logged."""
    found = run_and_tell({"pipeline_parallel_size": devices, **options}, devices=devices)
    return found["schedules"], found["said"]


def forwards_come_first(schedule: Schedule) -> bool:
    rows = ["".join(a.kind.value[0] for a in program if a.microbatch is not None) for program in schedule.programs]
    return all("F" not in row.lstrip("F") for row in rows)


@pytest.mark.parametrize("name", ["zb_h1", pytest.param("auto", marks=pytest.mark.nightly), "mine.csv"])
def test_training_runs_forwards_first_and_says_so_once(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(CSV)
    options: dict[str, Any] = {"num_microbatches": 3, "whole_batch_loss": True, "num_profiled_batches": 2}
    if name == "auto":
        options["stages_per_rank"] = 1
    first, second = pool.run(run, {**options, "schedule": str(path) if name.endswith("csv") else name}, timeout=120)
    schedules, said = first
    assert schedules == second[0]
    assert [schedule.num_microbatches for schedule in schedules] == [3, 3, 2, 3, 3, 2]
    assert all(schedule.whole_batch_loss and forwards_come_first(schedule) for schedule in schedules)
    assert said.count("whole_batch_loss=True") == 1 and "holds all 3 microbatches at once" in said
    assert said.count("its actions were reordered") == (name == "mine.csv")
    if name == "mine.csv":
        assert schedules[0].csv_text() == "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1I0,1W0,1B1,1B2\n"


def test_without_it_nothing_changes(pool: WorkerPool) -> None:
    schedules, said = pool.run(run, {"num_microbatches": 3, "schedule": "1f1b"}, timeout=120)[0]
    assert not forwards_come_first(schedules[0]) and "whole_batch_loss" not in said


def test_a_file_in_that_order_already_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    gpipe = build_schedule("gpipe", num_ranks=2, num_microbatches=3)
    gpipe.to_csv(path)
    options = PipelineParallelStrategy(schedule=path, whole_batch_loss=True).options.schedule
    found = options.source.program(gpipe.placement, 3)
    assert found.programs == gpipe.programs
    assert "put in" not in options.whole_batch_text(found)


# ---------------------------------------------------------------- what is held


class Model(pl.LightningModule):
    """What a block holds after F grows with ``num_tanh``; after I it holds the input and the gradient of its linear."""

    def __init__(self, num_tanh: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), *(nn.Tanh() for _ in range(num_tanh))) for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).square().mean().sqrt()


@pytest.fixture(scope="module")
def recording() -> RecordedModel:
    return recorded(num_tanh=4)


def recorded(num_tanh: int) -> RecordedModel:
    return recorded_training(Model(num_tanh), torch.ones(NUM_SAMPLES, WIDTH))


def layout_of(
    recording: RecordedModel,
    schedule: str,
    *,
    limit_gib: float | None = None,
    memory_limit_gib: float | None = None,
    num_microbatches: int = 6,
    whole: bool = True,
) -> Layout:
    source = schedule_source(schedule, stages_per_rank=1, whole_batch_loss=whole)
    options = ScheduleOptions(source, memory_limit_gib)
    request = LayoutRequest(options, 2, num_microbatches, CutOptions(), "cpu", device_memory(recording, limit_gib))
    return choose_layout(recording.record, recording.num_parameters, request)


def device_memory(recording: RecordedModel, limit_gib: float | None) -> DeviceMemory | None:
    model = replace(MemoryModel.of(ShardingSettings("replicate"), 1, StepDtypes()), whole_batch_loss=True)
    return None if limit_gib is None else DeviceMemory(limit_gib, model, recording, {})


def held(layout: Layout) -> tuple[float, ...]:
    return layout.costs.per_stage(2).held_after_forward


def test_the_last_stage_holds_what_is_joined_and_its_gradient(recording: RecordedModel) -> None:
    with_it, without = layout_of(recording, "gpipe"), layout_of(recording, "gpipe", whole=False)
    assert with_it.partition == without.partition
    output_bytes = NUM_SAMPLES * 3 * 4
    assert held(with_it)[0] == held(without)[0]
    assert held(with_it)[1] - held(without)[1] == 2 * output_bytes / GIB


def test_auto_is_given_no_limit_of_its_own_where_whole_batches_are_held(recording: RecordedModel) -> None:
    layout = layout_of(recording, "auto", num_microbatches=16)
    source = schedule_source("auto", whole_batch_loss=True)
    assert source.memory_limit(None, layout.costs, layout.placement) is None
    assert source.memory_limit(None, layout.costs, layout.placement, [1.0, 2.0]) == (1.0, 2.0)
    peaks = layout.start.simulate(layout.costs).peak_memory
    assert peaks == pytest.approx(tuple(16 * one for one in held(layout)))


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_a_limit_for_activations_is_kept_or_refused(recording: RecordedModel, schedule: str) -> None:
    need = 6 * max(held(layout_of(recording, schedule)))
    enough = layout_of(recording, schedule, memory_limit_gib=1.001 * need)
    enough.start.validate(costs=enough.costs, memory_limit=1.001 * need)
    with pytest.raises(
        ScheduleError,
        match=rf"memory_limit_gib=.*all 6 microbatches.*smallest limit that works is {need:g}\. Use fewer",
    ):
        layout_of(recording, schedule, memory_limit_gib=0.999 * need)


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_a_limit_for_all_memory_counts_every_microbatch(recording: RecordedModel, schedule: str) -> None:
    """Without the constraint ``auto`` and 1f1b hold fewer; a limit between the two needs is refused with it."""
    memory = device_memory(recording, 1.0)
    assert memory is not None
    found = layout_of(recording, schedule, num_microbatches=60)
    need = max(one.peak_bytes for one in memory.needs(found.partition, found.placement, found.start)) / GIB
    plain = build_schedule("1f1b", num_ranks=2, num_microbatches=60)
    less = max(one.peak_bytes for one in memory.needs(found.partition, found.placement, plain)) / GIB
    assert less < 0.9 * need
    fitting = layout_of(recording, schedule, limit_gib=1.001 * need, num_microbatches=60)
    assert fitting.partition == found.partition
    with pytest.raises(ConfigurationError) as refused:
        layout_of(recording, schedule, limit_gib=0.9 * need, num_microbatches=60)
    text = str(refused.value)
    assert "60 microbatches, all of them held at once for whole_batch_loss" in text and "of activations" in text
    assert "activation_checkpointing=True" in text and "fewer samples in a batch" in text
    assert "v_min" not in text and "num_microbatches" not in text  # these would not help


def test_limits_are_kept_where_microbatches_hold_more_after_input_gradients() -> None:
    """Then it matters where W stand; ``auto`` finds something within every limit that a schedule by hand keeps."""
    recording = recorded(num_tanh=1)
    memory = device_memory(recording, 1.0)
    assert memory is not None

    def keeps(schedule: str, num_bytes: int) -> bool:
        try:
            found = layout_of(recording, schedule, limit_gib=num_bytes / GIB, num_microbatches=60)
        except ConfigurationError:
            return False
        assert max(need.peak_bytes for need in memory.needs(found.partition, found.placement, found.start)) <= num_bytes
        return True

    limits = range(20_000, 120_000, 10_000)
    outcomes = {name: [keeps(name, limit) for limit in limits] for name in ("auto", "zb_h1", "1f1b")}
    for name in ("zb_h1", "1f1b"):
        assert outcomes[name] == sorted(outcomes[name]) and len(set(outcomes[name])) == 2
        assert all(by_search >= by_hand for by_search, by_hand in zip(outcomes["auto"], outcomes[name], strict=True))
