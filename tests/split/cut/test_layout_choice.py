"""Placement and cuts chosen for ``auto`` before anything is measured, and the costs that the choice is made by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from layouts import choose_layout
from one_process import build, record_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers_by_hand import WithLoss

from lightning_pp.errors import ConfigurationError, ScheduleError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.schedules.given_costs import given_costs
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.stage_costs import assumed_speed
from lightning_pp.planning.tuning import Layout, LayoutRequest
from lightning_pp.schedule import Placement, Schedule, StageCosts, build_schedule
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.unit_calls.units import discover_units

ARCHITECTURE = hf.LlamaConfig(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_attention_heads=4,
    attn_implementation="eager",
)


@pytest.fixture(scope="module")
def recording() -> tuple[nn.Module, StepRecord, dict[str, int], dict[str, torch.Tensor]]:
    module = build(lambda: WithLoss(hf.LlamaForCausalLM(ARCHITECTURE)))
    units = discover_units(module)
    ids = torch.randint(0, 64, (4, 128))
    batch = {"input_ids": ids, "labels": ids}
    return (
        module,
        record_of(module, batch),
        {unit: sum(p.numel() for p in units[unit].parameters()) for unit in units},
        batch,
    )


def layout_of(recording: Any, p: int, m: int, split_points: list[str] | None = None, **options: Any) -> Layout:
    limit, costs = options.pop("memory_limit_gib", None), given_costs(options.pop("costs", None))
    asked = ScheduleOptions(schedule_source(options.pop("schedule", "auto"), **options), limit, costs)
    return choose_layout(recording[1], recording[2], LayoutRequest(asked, p, m, CutOptions(split_points), "cpu"))


def span_ms(schedule: Schedule, costs: StageCosts) -> float:
    return max(schedule.simulate(costs).span_ms)


def test_estimated_costs_are_the_counted_operations(recording: Any) -> None:
    module, _, num_parameters, batch = recording
    layout = layout_of(recording, 2, 4, schedule="1f1b")
    with FlopCounterMode(display=False) as counter:
        loss = module.model(**batch).loss
        forward = counter.get_total_flops()
        loss.backward()
    speed = assumed_speed("cpu")
    costs = layout.costs.per_stage(2)
    assert sum(costs.forward) == pytest.approx(forward / speed.flops_per_ms + 2 * speed.action_ms, rel=0.01)
    backward = (counter.get_total_flops() - forward) / speed.flops_per_ms + 4 * speed.action_ms
    # the optimizer's part, 30 operations a parameter, is in W
    backward += 30 * sum(num_parameters.values()) / speed.flops_per_ms
    assert sum(costs.backward_input) + sum(costs.backward_weight) == pytest.approx(backward, rel=0.01)
    hidden_bytes = 4 * 128 * 256 * 4
    assert costs.p2p[0] >= speed.latency_ms + hidden_bytes / speed.bytes_per_ms


@pytest.mark.by_day(2)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 4), (4, 4)])
def test_the_best_predicted_placement_is_taken(recording: Any, p: int, m: int) -> None:
    """Beside the choice: a search for every placement by itself, with two percent for fewer stages."""
    found: list[Layout] = []
    for stages_per_rank in (1, 2) if 2 * p <= 8 else (1,):
        found.append(layout_of(recording, p, m, stages_per_rank=stages_per_rank))
    chosen = layout_of(recording, p, m)
    times = [span_ms(layout.start, layout.costs) for layout in found]
    better = len(found) > 1 and times[1] < 0.98 * times[0]
    assert chosen.placement.num_stages == (2 if better else 1) * p
    assert chosen.start.placement == chosen.placement
    assert chosen.reason.count("\n") == 2 and "> " in chosen.reason
    by_hand = build_schedule("1f1b", num_ranks=p, num_microbatches=m)
    assert span_ms(chosen.start, chosen.costs) <= span_ms(by_hand, found[0].costs)


def test_few_microbatches_take_two_stages_a_rank(recording: Any) -> None:
    """With as many microbatches as ranks one chunk must wait for most of a pass; half as long ones for half of that."""
    assert layout_of(recording, 4, 4).placement.num_stages == 8
    assert layout_of(recording, 2, 32).placement.num_stages == 2


def test_what_limits_the_choice(recording: Any) -> None:
    assert layout_of(recording, 4, 4, stages_per_rank=1).placement == Placement.interleaved(4)
    assert layout_of(recording, 2, 4, split_points=["model.model.layers.4"]).placement.num_stages == 2
    assert layout_of(recording, 2, 4, costs=StageCosts([1.0] * 6, 1, 1)).placement == Placement.interleaved(2, 3)
    assert layout_of(recording, 7, 4).placement.num_stages == 7, "fourteen stages would need more units"
    with pytest.raises(ConfigurationError, match="12 stages need at least 12 units, but the step calls 11"):
        layout_of(recording, 12, 4)


def test_memory_limits(recording: Any) -> None:
    free = layout_of(recording, 2, 16, stages_per_rank=1)
    held = free.costs.per_stage(2).held_after_forward
    limits = schedule_source("auto").memory_limit(None, free.costs, free.placement)
    assert limits == (4 * held[0], 4 * held[1])
    free.start.validate(costs=free.costs, memory_limit=limits)
    least = max(held)
    tight = layout_of(recording, 2, 16, stages_per_rank=1, memory_limit_gib=1.01 * least)
    tight.start.validate(costs=tight.costs, memory_limit=1.01 * least)
    with pytest.raises(ScheduleError, match=rf"memory_limit_gib=.*smallest limit that works is {least:g}"):
        layout_of(recording, 2, 16, stages_per_rank=1, memory_limit_gib=0.9 * least)
    with pytest.raises(ScheduleError, match=r"memory_limit_gib=.*1f1b holds .*smallest limit that works for it is"):
        layout_of(recording, 2, 16, schedule="1f1b", memory_limit_gib=1.1 * least)


def test_costs_of_other_cuts_are_told(recording: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.json"
    right = layout_of(recording, 2, 4, stages_per_rank=1).partition
    stages = [right.units_of_stage(stage) for stage in (0, 1)]
    StageCosts(1.0, 1.0, [1.0, 2.0]).to_json(path, measured_on={"stages": stages})
    layout_of(recording, 2, 4, costs=path)
    assert not caplog.messages
    StageCosts(1.0, 1.0, [1.0, 2.0]).to_json(path, measured_on={"stages": [stages[0][:-1], stages[1]]})
    layout = layout_of(recording, 2, 4, costs=path)
    assert "measured for other cuts: stage 0 had" in caplog.text and "to measure again" in caplog.text
    # no bytes in the file: those of the dry run
    assert layout.costs.held_after_forward == layout_of(recording, 2, 4, stages_per_rank=1).costs.held_after_forward
