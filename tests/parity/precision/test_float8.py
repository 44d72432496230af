"""torchao's float8 linears, emulated on CPUs, train in a pipeline as on one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from float8_models import RECIPES, Float8GPT, token_batches
from parity_run import QUIET
from pool import WorkerPool
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.runtime.split_backward.queue import WeightGradientQueue

Weights = dict[str, torch.Tensor]


def train(
    recipe: str, strategy: Any = "auto", batches: DataLoader[Any] | None = None, devices: int = 1, **options: Any
) -> tuple[list[float], Weights]:
    """The losses of a training, and the weights that this process holds after it."""
    torch.manual_seed(0)
    changes = options.pop("changes", {})
    module = Float8GPT(recipe, **changes)
    trainer = pl.Trainer(**QUIET, devices=devices, strategy=strategy, max_epochs=1, **options)
    trainer.fit(module, batches or token_batches())
    values = {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
    }
    return module.losses, {name: value.detach().clone() for name, value in values.items()}


def train_pipeline(recipe: str, settings: dict[str, Any], **options: Any) -> tuple[list[float], Weights, set[Any]]:
    """As :func:`train`, in one process of a pipeline; and the shapes of the weights that had a W."""
    WeightGradientQueue.watched = waited = set()
    devices = settings.pop("devices", 2)
    try:
        strategy = PipelineParallelStrategy(pipeline_parallel_size=2, **settings, check_first_batches=False)
        return *train(recipe, strategy, devices=devices, **options), {tuple(shape) for shape in waited}
    finally:
        WeightGradientQueue.watched = None


def assert_trained_alike(outcomes: list[Any], weights: Weights, tolerance: float) -> None:
    held = {name for _, own, _ in outcomes for name in own}
    assert held == set(weights)
    for _, own, _ in outcomes:
        for name, value in own.items():
            torch.testing.assert_close(value, weights[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_batches_are_trained_bit_for_bit(pool: WorkerPool, recipe: str, schedule: str) -> None:
    losses, weights = train(recipe)
    outcomes = pool.run(train_pipeline, recipe, {"schedule": schedule, "num_microbatches": 1}, world_size=2)
    assert outcomes[0][0] == losses and outcomes[1][0] == losses
    assert_trained_alike(outcomes, weights, 0.0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_microbatches_are_those_of_accumulated_gradients(pool: WorkerPool, recipe: str, schedule: str) -> None:
    """One device that accumulates gradients over the same microbatches takes the same scales."""
    _, weights = train(recipe, batches=token_batches(batch_size=2), accumulate_grad_batches=2)
    outcomes = pool.run(train_pipeline, recipe, {"schedule": schedule, "num_microbatches": 2}, world_size=2)
    assert_trained_alike(outcomes, weights, 1e-5)
    waited = set().union(*(shapes for _, _, shapes in outcomes))
    assert ({(96, 32), (64, 32), (32, 64)} <= waited) == (schedule != "1f1b")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_compiled_units_train(pool: WorkerPool, schedule: str) -> None:
    settings = {"schedule": schedule, "num_microbatches": 2, "compile": {"backend": "aot_eager"}}
    losses, _ = train("rowwise")
    for own, _, _ in pool.run(train_pipeline, "rowwise", settings, world_size=2):
        assert own == pytest.approx(losses, rel=1e-5)


def sharded(**settings: Any) -> dict[str, Any]:
    return {"num_microbatches": 2, "schedule": "zb_h1", "sharding": "full_shard", "devices": 4, **settings}


def test_shards_gathered_in_float8_train_as_those_gathered_whole(pool: WorkerPool) -> None:
    changes = {"enable_fsdp_float8_all_gather": True}
    whole = pool.run(train_pipeline, "tensorwise", sharded(), world_size=4)
    gathered = pool.run(train_pipeline, "tensorwise", sharded(), world_size=4, changes=changes)
    for one, other in zip(whole, gathered, strict=True):
        assert one[0] == other[0]
    assert (64, 32) in whole[0][2]


@pytest.mark.nightly
@pytest.mark.parametrize("gathers_float8", [True, False])
def test_sharded_gradients_train_as_replicas(pool: WorkerPool, gathers_float8: bool) -> None:
    options = {"changes": {"enable_fsdp_float8_all_gather": True}} if gathers_float8 else {}
    replicas = pool.run(train_pipeline, "tensorwise", sharded(sharding="replicate"), world_size=4)
    outcomes = pool.run(train_pipeline, "tensorwise", sharded(sharding="shard_grad_op"), world_size=4, **options)
    weights = {name: value for _, own, _ in replicas for name, value in own.items()}
    assert_trained_alike(outcomes, weights, 1e-5)
    for (losses, _, waited), (expected, *_) in zip(outcomes, replicas, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert ((64, 32) in waited) != gathers_float8  # what is gathered in float8 has its weight gradient in I


def test_whole_weights_made_for_gathers_in_float8_are_refused(pool: WorkerPool) -> None:
    report = pool.run(
        train_pipeline,
        "tensorwise",
        {"num_microbatches": 2},
        world_size=2,
        changes={"enable_fsdp_float8_all_gather": True},
        expect_failure=True,
    )
    for failure in report.failures:
        assert failure is not None
        assert "set enable_fsdp_float8_all_gather=False" in str(failure)
        assert "WeightWithDynamicFloat8CastTensor" in str(failure)
