"""A head that is heavier than a stage is no reason for a long step."""

from __future__ import annotations

import io

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from lightning_pp.cli.plan.report import Plan
from lightning_pp.cli.plan.run import make_plan
from lightning_pp.schedule import StageCosts


def planned(*overrides: str) -> tuple[Plan, str]:
    stream = io.StringIO()
    # by FLOPs alone: how a head is cut, whatever the memory of a device moves
    sizes = ["recipe=llama", "trainer.devices=64", "strategy.pipeline_parallel_size=8", "peak_tflops=989.4"]
    with initialize_config_module("lightning_pp.conf", version_base="1.3"):
        config = compose("plan", overrides=[*sizes, *overrides])
    plan = make_plan(config, Console(file=stream, width=200))
    assert plan is not None
    return plan, stream.getvalue()


def test_llama_with_128_thousand_words_on_8_ranks_is_as_quick_as_equal_stages() -> None:
    """Within a tenth."""
    plan, text = planned("strategy.schedule=zb_v", "schedules=[zb_v]")
    found = plan.shown
    placement, costs = found.schedule.placement, found.cut.costs.per_stage(found.schedule.placement.num_stages)
    number = placement.num_stages
    equal = StageCosts(
        sum(costs.forward) / number,
        sum(costs.backward_input) / number,
        sum(costs.backward_weight) / number,
        p2p=sum(costs.p2p) / number,
    )
    of_equal = found.source.program(placement, found.schedule.num_microbatches, equal, None).simulate(equal)
    assert found.step_time < 1.1 * of_equal.makespan
    assert "The head 'model.lm_head' is cut along its classes into 32 parts. With a whole head, a step is" in text
    assert {unit.name.partition("[")[0] for stage in found.cut.summary.stages[9:] for unit in stage.units} == {
        "model.lm_head"
    }
    # every stage with a part holds the whole weight, and the table of memory has it
    weight = 4 * 128_256 * 2048
    assert all(stage.parameter_bytes >= weight for stage in found.cut.summary.stages[9:])
    assert all(rank.peak > weight for rank in found.memory)


@pytest.mark.nightly
def test_its_head_is_in_as_many_parts_beside_a_schedule_of_fewer_stages_and_whole_it_takes_longer() -> None:
    plan, _ = planned("strategy.schedule=zb_v", "schedules=[zb_v]")
    found = plan.shown
    beside, _ = planned("schedules=[zb_v]")
    other = beside.table.named("zb_v")
    assert other is not None
    assert other.step_time == found.step_time

    whole, text = planned("strategy.schedule=zb_v", "schedules=[zb_v]", "strategy.split_head=false")
    assert whole.shown.step_time > 1.3 * found.step_time
    assert "The head" not in text
