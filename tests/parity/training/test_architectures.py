"""Modules of many kinds, trained, validated and asked for predictions as pipelines: as on one device, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning_architectures import ARCHITECTURES
from parity_run import QUIET, tensor_difference, whole_weights
from pool import WorkerPool
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.strategy import setup

TOLERANCE = 1e-9
# the last batch is smaller than the others, and smaller than the number of microbatches
TRAINING_SIZES, VALIDATION_SIZES = (5, 2), (4,)


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Notes(L.Callback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.run.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.run.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def run(name: str, num_stages: int | None = None, schedule: str = "1f1b", is_checked: bool = True) -> Run:
    """A plain training, or one as a pipeline of ``num_stages``, whose first batches are checked or not."""
    entry = ARCHITECTURES[name]
    torch.manual_seed(11)
    module = entry.make()
    torch.manual_seed(5)
    batches = {sizes: [entry.batch(size) for size in sizes] for sizes in (TRAINING_SIZES, VALIDATION_SIZES)}
    strategy: Any = "auto"
    if num_stages is not None:
        strategy = PipelineParallelStrategy(
            num_stages, num_microbatches=entry.num_microbatches, schedule=schedule, check_first_batches=is_checked
        )
    result = Run()
    trainer = L.Trainer(
        **QUIET,
        devices=num_stages or 1,
        strategy=strategy,
        max_epochs=1,
        precision="64-true",
        use_distributed_sampler=False,
        callbacks=[Notes(result)],
    )

    def loader(sizes: tuple[int, ...]) -> DataLoader[Any]:
        return DataLoader(batches[sizes], batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]

    validates = type(module).validation_step is not L.LightningModule.validation_step
    trainer.fit(module, loader(TRAINING_SIZES), loader(VALIDATION_SIZES) if validates else None)
    result.weights = whole_weights(module)
    if type(module).predict_step is not L.LightningModule.predict_step:
        result.predictions = tree_leaves(trainer.predict(module, loader(VALIDATION_SIZES)))
    return result


def run_with_units_first(name: str, num_stages: int, schedule: str) -> Run:
    """As :func:`run`, with each distinct unit run once beforehand, as on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "LOADING_DEVICES", {"cpu"})
        return run(name, num_stages, schedule, is_checked=False)


@functools.cache
def on_one_device(name: str) -> Run:
    return run(name)


def check(pool: WorkerPool, name: str, num_stages: int, schedule: str, run: Callable[..., Run] = run) -> None:
    expected = on_one_device(name)
    weights: dict[str, Tensor] = {}
    for found in pool.run(run, name, num_stages, schedule, world_size=num_stages, timeout=100):
        assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert len(found.metrics) == len(expected.metrics)
        for mine, theirs in zip(found.metrics, expected.metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=TOLERANCE)
        assert len(found.predictions) == len(expected.predictions)
        for prediction, one in zip(found.predictions, expected.predictions, strict=True):
            assert tensor_difference(prediction.double(), one.double()) < TOLERANCE
        weights |= found.weights
    assert sorted(weights) == sorted(expected.weights)
    errors = {name: tensor_difference(weights[name], value) for name, value in expected.weights.items()}
    assert max(errors.values()) < TOLERANCE, max(errors, key=lambda name: errors[name])


# kinds of layers alone; the others have values or parameters that go other ways than from one layer to the next
AT_NIGHT = ("windows", "diffusion", "perceiver", "detector", "adapted", "state_space", "tasks")


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in AT_NIGHT else []) for name in ARCHITECTURES]
)
def test_pipeline_equals_one_device(pool: WorkerPool, name: str) -> None:
    check(pool, name, 2, "zb_h1")


def test_tensors_in_the_places_of_parameters(pool: WorkerPool) -> None:
    """By ``functional_call``, with batches of several sizes."""
    check(pool, "modulated", 2, "1f1b")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["bootstrap", "momentum_contrast"])
def test_parameters_that_follow_others_across_three_stages(pool: WorkerPool, name: str) -> None:
    """Groups of holders overlap here: the last stage shares parameters with both others."""
    check(pool, name, 3, "1f1b")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_units_that_ran_once_beforehand_train_the_same(pool: WorkerPool, name: str) -> None:
    check(pool, name, 2, "zb_h1", run_with_units_first)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_three_stages(pool: WorkerPool, name: str, schedule: str) -> None:
    check(pool, name, 3, schedule)
