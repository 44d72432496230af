"""``activation_offload=True`` in layouts, limits of memory and searches, and what it is refused with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import choose_layout
from small_models import Blocks

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError, ScheduleError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.predictions import step_time
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.planning.stage_model import RecordedModel, RecordingOptions, record_model
from lightning_pp.planning.tuning import Layout, LayoutRequest
from lightning_pp.schedule import Placement, StageCosts
from lightning_pp.split.memory.state_memory import StepDtypes

GIB = float(1 << 30)
NUM_RANKS, NUM_MICROBATCHES = 4, 12


@pytest.fixture(scope="module")
def recording() -> RecordedModel:
    module, batch = Blocks(8, 16), (torch.randn(4096, 16), torch.randn(4096))
    return record_model(
        module,
        device=torch.device("cpu"),
        step=lambda dry: module.training_step(batch, 0),
        with_gradients=True,
        patterns=None,
        num_stages=NUM_RANKS,
        how=RecordingOptions(),
    )


def memory_of(recording: RecordedModel, options: ScheduleOptions, limit_gib: float) -> DeviceMemory:
    model = MemoryModel.of(ShardingSettings("replicate"), 1, StepDtypes(), options=options)
    return DeviceMemory(limit_gib, model, recording, {})


def layout_of(recording: RecordedModel, offload: bool, limit_gib: float | None, schedule: str = "1f1b") -> Layout:
    options = ScheduleOptions(schedule_source(schedule, stages_per_rank=1), activation_offload=offload)
    memory = None if limit_gib is None else memory_of(recording, options, limit_gib)
    request = LayoutRequest(options, NUM_RANKS, NUM_MICROBATCHES, CutOptions(), "cpu", memory)
    return choose_layout(recording.record, recording.num_parameters, request)


def peak_gib(recording: RecordedModel, layout: Layout) -> float:
    memory = memory_of(recording, ScheduleOptions(schedule_source("1f1b")), 1.0)
    return max(need.peak_bytes for need in memory.needs(layout.partition, layout.placement, layout.start)) / GIB


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_a_limit_is_kept_that_cannot_be_kept_without(recording: RecordedModel, schedule: str) -> None:
    before, after = (layout_of(recording, offload, None) for offload in (False, True))
    assert before.start.programs != after.start.programs and before.partition == after.partition
    highest, lower = peak_gib(recording, before), peak_gib(recording, after)
    assert lower < 0.9 * highest
    limit = (lower + highest) / 2 if schedule == "1f1b" else 1.1 * lower
    if schedule == "1f1b":
        with pytest.raises(ConfigurationError, match="No cut of the model"):
            layout_of(recording, False, limit)
    layout = layout_of(recording, True, limit, schedule)
    assert layout.start.offloads
    assert peak_gib(recording, layout) <= limit


@pytest.mark.parametrize("name", ["1f1b", "auto"])
def test_a_limit_for_microbatches_is_kept_with_the_help_of_the_host(name: str) -> None:
    source, placement = schedule_source(name, stages_per_rank=1), Placement.interleaved(3)
    costs = StageCosts(1.0, 1.0, 1.0, held_after_forward=1.0, held_after_input=0.2, offload=0.5, held_on_host=0.9)
    found = source.program(placement, 6, costs, 2.8)
    assert found.offloads
    assert max(found.simulate(costs).peak_memory) <= 2.8
    with pytest.raises(ScheduleError):
        source.program(placement, 2, costs, 0.9)
    alone = StageCosts(1.0, 1.0, 1.0, held_after_forward=1.0, held_after_input=0.2)
    if name == "1f1b":
        with pytest.raises(ScheduleError):
            source.program(placement, 6, alone, 2.8)
    else:  # there is an order that needs no host, and it takes as long or longer
        other = source.program(placement, 6, alone, 2.8)
        assert step_time(found, costs) <= step_time(other, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_offload": 0.5}, "activation_offload=0.5 must be True or False"),
        ({"activation_checkpointing": [torch.ops.aten.mm.default]}, "cannot move the tensors that a policy"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PipelineParallelStrategy(**{"activation_offload": True, **options})


def test_tensor_ranks_are_refused_before_anything_is_recorded() -> None:
    options = PipelineParallelStrategy(activation_offload=True).options
    assert options.tensor_ranks(1).size == 1
    with pytest.raises(ConfigurationError, match="does not work with tensor_parallel_size=2"):
        options.tensor_ranks(2)
