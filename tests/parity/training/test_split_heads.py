"""With its head cut along the classes, a pipeline trains as one device does: float64 to 1e-9, under the same names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_models import DATASETS, MODELS, LlamaFloat64Loss
from parity_run import Layout, Outcome, Settings, differences, distance_moved, merged, reference, train
from pool import WorkerPool
from torch import Tensor

from lightning_pp import PipelineParallelStrategy


class LooksAtLogits(LlamaFloat64Loss):
    """Every second batch logs what needs all logits, and so does validation: their steps call the whole head."""

    def logits(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        if batch_idx % 2:
            self.log("largest", logits.detach().amax(-1).mean())
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        largest = self.logits(batch).amax(-1).mean()
        self.log("val_loss", largest, sync_dist=True)
        return largest


MODELS["looks_at_logits"] = LooksAtLogits
DATASETS["looks_at_logits"] = DATASETS["llama_float64_loss"]


class SplitHeadStages(PipelineParallelStrategy):
    """Notes which units each stage has."""

    stages: list[list[str]]

    def teardown(self) -> None:
        partition = self.engine.split.partition
        self.stages = [
            [unit for unit in partition.units_of_stage(stage) if unit in partition.unit_costs]
            for stage in range(partition.num_stages)
        ]
        super().teardown()


def train_with_parts(settings: Settings, layout: Layout, options: dict[str, Any]) -> tuple[Outcome, list[list[str]]]:
    """In a worker: trains, and tells the units that the stages have in training."""
    strategy = SplitHeadStages(
        pipeline_parallel_size=layout.pipeline,
        data_parallel_size=layout.replicas,
        num_microbatches=layout.num_microbatches,
        schedule=layout.schedule,
        check_first_batches=False,
        **options,
    )
    outcome = train(settings, strategy, layout.world_size)
    return outcome, strategy.stages


ACCUMULATED: Any = {"accumulate": 2, "clip_val": 0.05, "clip_algorithm": "norm", "num_samples": 22, "max_epochs": 1}
CASES: dict[str, tuple[Settings, Layout, dict[str, Any]]] = {
    "llama": (Settings("llama_float64_loss"), Layout("1f1b", 3, 1, 4), {"split_head": 4}),
    "llama, W apart": (Settings("llama_float64_loss", **ACCUMULATED), Layout("zb_h1", 4, 1, 4), {"split_head": 6}),
    "tied": (Settings("gpt2_float64_loss"), Layout("zb_h1", 3, 1, 4), {"split_head": 5}),
    "tied, V": (Settings("gpt2_float64_loss", **ACCUMULATED), Layout("zb_v", 2, 1, 4), {"split_head": 6}),
    "tied, replicas": (
        Settings("gpt2_float64_loss", **ACCUMULATED),
        Layout("1f1b", 2, 2, 3),
        {"split_head": 8, "sharding": "full_shard"},
    ),
    "blocks run again": (
        Settings("llama_float64_loss"),
        Layout("1f1b", 3, 1, 4),
        {"split_head": 4, "activation_checkpointing": True},
    ),
    "the head runs again": (
        Settings("llama_float64_loss"),
        Layout("zb_h1", 3, 1, 4),
        {"split_head": 4, "activation_checkpointing": ["model.lm_head"]},
    ),
    "t5": (Settings("t5"), Layout("1f1b", 3, 1, 4), {"split_head": 4}),
    "now and then": (Settings("looks_at_logits"), Layout("1f1b", 2, 1, 4), {"split_head": 4}),
    "vit": (Settings("vit"), Layout("1f1b", 2, 1, 4), {"split_head": 3}),
}


# each differs from another case in its schedule, its layout or its model alone
AT_NIGHT = ("llama", "llama, W apart", "tied", "tied, replicas", "t5", "now and then", "the head runs again")


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.nightly] if name in AT_NIGHT else [])
        for name, case in CASES.items()
    ],
)
def test_training_with_a_head_in_parts(pool: WorkerPool, case: tuple[Settings, Layout, dict[str, Any]]) -> None:
    settings, layout, options = case
    found = pool.run(train_with_parts, settings, layout, options, world_size=layout.world_size, timeout=120)
    stages = found[0][1]
    parts = [[unit for unit in units if "[" in unit] for units in stages]
    assert sum(map(len, parts)) == options["split_head"]
    outcome = merged([outcome for outcome, _ in found], layout)
    expected = reference(settings)
    assert distance_moved(settings, expected) > 1e-4
    difference = differences(outcome, expected)
    assert max(difference.loss, difference.val_loss, difference.epoch_loss) < 1e-9, difference
    assert difference.weight < 1e-9, difference


@pytest.mark.nightly
def test_mixed_precision_keeps_sums_in_float32(pool: WorkerPool) -> None:
    """Losses are those of one device to the rounding of bfloat16, with a batch's tokens counted alike."""
    settings = Settings("gpt2", precision="bf16-mixed", max_epochs=1)
    layout = Layout("zb_h1", 2, 1, 4)
    options = {"split_head": 4, "split_points": ["model.lm_head[8:16]"]}
    found = pool.run(train_with_parts, settings, layout, options, world_size=2, timeout=120)
    outcome = merged([outcome for outcome, _ in found], layout)
    expected = reference(settings)
    assert max(map(abs, (a - b for a, b in zip(outcome.losses, expected.losses, strict=True)))) < 2e-3
    assert {value.dtype for value in outcome.weights.values()} == {torch.float32}
