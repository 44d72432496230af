"""Every architecture, cut into stages that run in turn, gives the losses, logs and gradients of the whole model."""

from __future__ import annotations

from typing import Any

import architectures
import pytest
from one_process import OneProcessPipeline, compare, compare_evaluation
from torch import nn

# with weight gradients deferred; what a split backward changes, it changes at any number of stages
CASES: list[Any] = [(name, 3) for name in architectures.ARCHITECTURES]
OTHER_NUMBERS = [
    *((name, 2) for name in ("residual_mlp", "unet", "shared_block", "tied_by_hand", "frozen_trunk", "plain")),
    *(
        (name, 4)
        for name in ("resnet", "mixture_of_experts", "two_towers", "tied_modules", "in_place_edits", "aliased")
    ),
]
CASES += OTHER_NUMBERS
CASES += [
    pytest.param(name, num_stages, marks=pytest.mark.nightly)
    for name in architectures.ARCHITECTURES
    for num_stages in (2, 4)
    if (name, num_stages) not in [*OTHER_NUMBERS, ("plain", 4)]
]


@pytest.mark.by_day(8)
@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_training_equals_the_whole_model(name: str, num_stages: int) -> None:
    pipeline, _ = compare(
        architectures.ARCHITECTURES[name][0],
        architectures.batches_of(name),
        num_stages,
        splits_backward=num_stages % 2 == 1,
    )
    stages = pipeline.split.partition.stage_of_unit
    assert set(stages.values()) == set(range(num_stages))
    assert all(pipeline.split.owned_by(stage) for stage in range(num_stages))


@pytest.mark.by_day(3)
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_evaluation_equals_the_whole_model(name: str) -> None:
    compare_evaluation(architectures.ARCHITECTURES[name][0], architectures.batches_of(name)[0], 3)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "name", ["encoder_decoder", "recurrent", "tied_by_hand", "aliased", "mixture_of_experts", "in_place_edits"]
)
def test_stages_that_have_dropped_parameters_find_the_same_plan(name: str) -> None:
    pipeline, _ = compare(architectures.ARCHITECTURES[name][0], architectures.batches_of(name), 3, own_dry_runs=True)
    for batch in architectures.batches_of(name, (3, 4)):
        edges = [plan.edges for plan in pipeline.plans(batch)]
        assert edges[0] == edges[1] == edges[2]


def test_another_batch_size_needs_no_new_cut() -> None:
    batches = architectures.batches_of("two_towers", (4, 1, 3))
    compare(architectures.ARCHITECTURES["two_towers"][0], batches, 3)


def test_split_points_and_units_are_followed() -> None:
    architecture, _ = architectures.ARCHITECTURES["residual_mlp"]
    batches = architectures.batches_of("residual_mlp")
    pipeline, _ = compare(architecture, batches, 3, split_points=["layers.1", "layers.5"])
    assert pipeline.split.partition.units_of_stage(1) == [f"layers.{index}" for index in range(1, 5)]
    pipeline, _ = compare(architecture, batches, 2, units=["layers.[12345]"])
    assert pipeline.split.partition.units_of_stage(0)[0] == "layers.0"


def test_an_unowned_parameter_holds_no_memory_and_keeps_its_name() -> None:
    pipeline = OneProcessPipeline(
        architectures.ARCHITECTURES["tied_modules"][0], architectures.batches_of("tied_modules")[0], 3
    )
    names = [set(dict(stage.module.named_parameters())) for stage in pipeline.stages]
    assert "embedding.weight" in names[0] & names[2]
    assert "embedding.weight" not in names[1]
    assert names[0] | names[1] | names[2] == set(dict(pipeline.split.module.named_parameters()))
    block = pipeline.stages[0].module.get_submodule("blocks.3")
    assert isinstance(block, nn.Module)
    assert not list(block.parameters())
    assert block.up.weight.shape == (16, 8)
