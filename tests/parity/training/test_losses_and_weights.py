"""A pipelined training gives the losses and the weights of a plain one on one device, in float64 to 1e-9.

The default run has every variant once; ``--nightly`` runs the cross product. Two models
compute their loss in float32 themselves, whatever their weights are: transformers' causal language models upcast logits
``.float()``. There losses, and gradients a little, can only be as exact as float32; each has a twin with a float64 loss
that is held to 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from parity_models import MODELS as ALL_MODELS
from parity_run import Layout, Settings, differences, distance_moved, reference, run_pipeline, tensor_difference
from pool import WorkerPool

from lightning_pp.schedule import available_schedules

TOLERANCE = 1e-9
FLOAT32_LOSS_TOLERANCE = 1e-6
FLOAT32_WEIGHT_TOLERANCE = 1e-7
FLOAT32_LOSSES = ("gpt2", "llama")
MODELS = [name for name in ALL_MODELS if not name.startswith(("odd_", "short_"))]  # those are for tests of their own
MAIN_SCHEDULES = ("gpipe", "1f1b", "zb_h1")

# 14 samples in batches of 8 and 6 in batches of 4: the last batch is smaller, in training and in validation
PLAIN: dict[str, Any] = {}
CLIPPED = {"accumulate": 2, "clip_val": 0.05, "clip_algorithm": "norm"}
ACCUMULATED = {**CLIPPED, "num_samples": 22, "max_epochs": 1}  # two updates, the second of one batch
CLIPPED_BY_VALUE = {"clip_val": 1e-3, "clip_algorithm": "value", "optimizer": "adamw", "scheduler": True}
GROUPS_AND_FROZEN = {"two_groups": True, "scheduler": True, "frozen": True, "accumulate": 2}
FEWER_SAMPLES = {"num_samples": 10, "batch_size": 4, "num_val_samples": 6, "two_groups": True}
VARIANTS = {
    "plain": PLAIN,
    "accumulated": ACCUMULATED,
    "clipped_by_value": CLIPPED_BY_VALUE,
    "groups_and_frozen": GROUPS_AND_FROZEN,
    "fewer_samples": FEWER_SAMPLES,
}
# other files of this folder train the other models and the other variants
BY_DAY = [
    ("llama_float64_loss", "accumulated", Layout("zb_h1", 2, 1, 3)),
    ("residual_mlp", "groups_and_frozen", Layout("zb_h1", 4, 1, 4)),
    ("residual_mlp", "fewer_samples", Layout("1f1b", 3, 1, 6)),
    ("residual_mlp", "clipped_by_value", Layout("gpipe", 3, 1, 2)),
]

_LAYOUTS = [Layout("", 2, 1, 3), Layout("", 3, 1, 4), Layout("", 2, 2, 3), Layout("", 1, 2, 2), Layout("", 4, 1, 8)]
CROSS_PRODUCT = [
    (model, variant, replace(layout, schedule=schedule))
    for model, variant, schedule, layout in product(MODELS, VARIANTS, MAIN_SCHEDULES, _LAYOUTS)
    # Adam divides by the gradient's size, so rounding is all that is left of float32 gradients that should be zero
    if not (model in FLOAT32_LOSSES and VARIANTS[variant].get("optimizer") == "adamw")
] + [
    (model, variant, layout)
    for model, variant, layout in product(
        MODELS,
        ("plain", "accumulated", "groups_and_frozen"),
        [
            *(Layout("interleaved_1f1b", *sizes) for sizes in ((1, 1, 1), (2, 1, 4), (2, 2, 3))),
            *(Layout("zb_v", *sizes) for sizes in ((1, 1, 3), (2, 1, 4), (2, 2, 3))),
        ],
    )
]
EVERY_SCHEDULE_BY_DAY = [("auto", "residual_mlp")]


def _id(case: tuple[str, str, Layout]) -> str:
    return "-".join(str(part) for part in case)


def check(pool: WorkerPool, settings: Settings, layout: Layout, record: Callable[[str, object], None]) -> None:
    """Trains both ways and compares."""
    expected = reference(settings)
    assert distance_moved(settings, expected) > 1e-4, "too little training to tell gradients apart"
    found = differences(run_pipeline(pool, settings, layout), expected)
    record("differences", str(found))
    is_float32 = settings.model in FLOAT32_LOSSES
    assert max(found.loss, found.val_loss, found.epoch_loss) < (FLOAT32_LOSS_TOLERANCE if is_float32 else TOLERANCE)
    assert found.weight < (FLOAT32_WEIGHT_TOLERANCE if is_float32 else TOLERANCE), found.worst_weight


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    "case",
    [*BY_DAY, *(pytest.param(case, marks=pytest.mark.nightly) for case in CROSS_PRODUCT if case not in BY_DAY)],
    ids=_id,
)
def test_pipeline_equals_one_device(
    pool: WorkerPool, case: tuple[str, str, Layout], record_property: Callable[[str, object], None]
) -> None:
    model, variant, layout = case
    check(pool, Settings(model, **VARIANTS[variant]), layout, record_property)


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        # by day every schedule has its gradients compared, in test_gradients.py
        case if case in EVERY_SCHEDULE_BY_DAY else pytest.param(*case, marks=pytest.mark.nightly)
        for case in product(available_schedules(), ["residual_mlp", "gpt2_float64_loss"])
    ],
)
def test_every_schedule(
    pool: WorkerPool, schedule: str, model: str, record_property: Callable[[str, object], None]
) -> None:
    """``auto`` changes its schedule before the last of four batches."""
    settings = Settings(model, num_samples=18, batch_size=12, **CLIPPED)
    check(pool, settings, Layout(schedule, 2, 1, 6), record_property)


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        (model, variant)
        if any(case[:2] == (model, variant) for case in BY_DAY)
        else pytest.param(model, variant, marks=pytest.mark.nightly)
        for model, variant in product(MODELS, ("accumulated", "clipped_by_value"))
    ],
)
def test_clipping_of_these_settings_changes_the_training(model: str, variant: str) -> None:
    """Else the comparisons above would say nothing about clipping."""
    clipped = Settings(model, **VARIANTS[variant])
    weights = reference(clipped).weights
    unclipped = reference(replace(clipped, clip_val=None, clip_algorithm=None)).weights
    assert max(tensor_difference(weights[name], unclipped[name]) for name in weights) > 1e-4
