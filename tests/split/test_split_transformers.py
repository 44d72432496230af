"""Models of transformers, cut into stages that run in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers_by_hand
from one_process import OneProcessPipeline, compare, compare_evaluation
from torch import nn

CASES: list[Any] = [(name, 3) for name in transformers_by_hand.ARCHITECTURES] + [("gpt2", 2), ("llama", 4)]
CASES += [pytest.param(*case, marks=pytest.mark.nightly) for case in (("gpt2", 4), ("llama", 2), ("t5", 2), ("t5", 4))]


@pytest.mark.by_day(3)
@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_training_equals_the_whole_model(name: str, num_stages: int) -> None:
    compare(
        transformers_by_hand.ARCHITECTURES[name][0],
        transformers_by_hand.batches_of(name),
        num_stages,
        splits_backward=num_stages == 3,
    )


def batches_of(name: str) -> list[Any]:
    """Two of one size, so that a step is recorded once."""
    return transformers_by_hand.batches_of(name, (3, 3))


@pytest.mark.parametrize(
    "name",
    [
        name if name == "t5" else pytest.param(name, marks=pytest.mark.nightly)
        for name in transformers_by_hand.ARCHITECTURES
    ],
)
def test_training_with_every_layer_run_again_equals_the_whole_model(name: str) -> None:
    """Llama and T5 put the keys of each layer into a cache that they are given, and would find them there."""
    compare(transformers_by_hand.ARCHITECTURES[name][0], batches_of(name), 3, splits_backward=True, runs_again=True)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", ["gpt2", "t5", "clip", "mixtral"])
def test_evaluation_equals_the_whole_model(name: str) -> None:
    compare_evaluation(transformers_by_hand.ARCHITECTURES[name][0], transformers_by_hand.batches_of(name)[0], 3)


def test_masks_are_made_on_every_stage_and_not_sent() -> None:
    pipeline, _ = compare(transformers_by_hand.llama, batches_of("llama"), 3)
    plan = pipeline.plans(batches_of("llama")[0])[0]
    assert [edge.spec.shape for edge in plan.edges] == [(3, 7, 16), (3, 7, 16)]


def test_position_bias_goes_straight_to_the_stages_that_use_it() -> None:
    """T5's layers hand the bias of their first on; it is sent from there, and only once to each stage."""
    pipeline, _ = compare(transformers_by_hand.t5, batches_of("t5"), 4)
    plan = pipeline.plans(batches_of("t5")[0])[0]
    calls = plan.record.calls
    biases = [edge for edge in plan.edges if edge.spec.shape[1:] == (2, 7, 7)]
    assert {calls[edge.value.call].unit for edge in biases} == {"model.encoder.block.0"}
    assert len({(edge.value, edge.target) for edge in biases}) == len(biases)


def test_router_logits_collected_inside_units_are_carried() -> None:
    """The auxiliary loss of a mixture of experts reads what hooks on the routers have collected."""
    architecture = lambda: transformers_by_hand.mixtral(output_router_logits=True)  # noqa: E731
    pipeline, _ = compare(architecture, batches_of("mixtral"), 3)
    edges = pipeline.plans(batches_of("mixtral")[0])[0].edges
    logits = [edge for edge in edges if edge.spec.shape == (21, 3)]  # of 3 x 7 tokens for 3 experts
    assert logits and all(edge.target == 2 and edge.has_gradient for edge in logits)
    assert len(edges) == 2 + len(logits)


def test_mixture_with_a_fused_product_of_experts() -> None:
    """The default implementation groups tokens by expert; its product has no float64, so only shapes are compared."""

    class Single(transformers_by_hand.WithLoss):
        def double(self) -> Single:
            return self

    def architecture() -> nn.Module:
        model = transformers_by_hand.mixtral().model
        model.set_experts_implementation("grouped_mm")
        return Single(model)

    batch = transformers_by_hand.text_batch(2)
    pipeline = OneProcessPipeline(architecture, batch, 2)
    plan = pipeline.plans(batch)[0]
    assert [edge.spec.shape for edge in plan.edges] == [(2, 7, 16)]
    assert plan.edges[0].spec.dtype == torch.float32
