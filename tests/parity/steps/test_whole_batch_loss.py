"""Losses over the whole batch, as on one device: in every schedule, with what a trainer does besides, and refusals."""

from __future__ import annotations

import functools
import re
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from feature_parts import assert_equal_trees
from lightning.pytorch.strategies import DDPStrategy
from parity_run import QUIET, Layout, tensor_difference
from pool import WorkerPool
from torch import Tensor, nn
from torchmetrics import SumMetric
from whole_batch_parts import LOSSES, WIDTH, Pairs, WholeBatchModel, run_whole

from lightning_pp.schedule import available_schedules
from lightning_pp.strategy.plan_only import FirstStep, look_at_first_step

EVERY_SCHEDULE = sorted(available_schedules())
# every loss, in schedules that split backward, put the last stage on rank 0, and interleave
COVERING = [
    ("contrastive", Layout("1f1b", 2, 1, 3)),
    ("nt_xent", Layout("zb_v", 2, 1, 3)),
    ("root_of_mean", Layout("zb_h1", 2, 1, 4)),
    ("batch_hard", Layout("interleaved_zb", 2, 1, 4)),
    ("dice", Layout("gpipe", 3, 1, 3)),
    ("temperature", Layout("zb_v", 3, 1, 3)),
    ("tied", Layout("zb_h2", 3, 1, 3)),
    ("loss_module", Layout("zb_h1", 2, 1, 3)),
    ("loss_module", Layout("dualpipe_v", 2, 1, 4)),
    ("values_of_earlier_stages", Layout("zb_h1", 3, 1, 3)),
    # what the code between units edits goes to another stage of its rank, and to other ranks
    ("values_of_earlier_stages", Layout("interleaved_1f1b", 3, 1, 3)),
    ("contrastive", Layout("interleaved_1f1b", 1, 1, 3)),
    ("nt_xent", Layout("zb_v", 1, 1, 1)),
]
EVERYTHING = [
    (loss, Layout(schedule, pipeline, 1, 6)) for schedule in EVERY_SCHEDULE for loss in LOSSES for pipeline in (2, 3)
]


@functools.cache
def on_one_device(loss: str, make: Any = WholeBatchModel, **kwargs: Any) -> dict[str, Any]:
    return run_whole(None, loss, make, data=dict(kwargs.pop("data", ())), **kwargs)


def check(
    pool: WorkerPool, loss: str, layout: Layout, make: Any = WholeBatchModel, arguments: Any = None, **kwargs: Any
) -> None:
    """Every rank saw the losses, logs and attributes of one device, and has its weights."""
    expected = on_one_device(loss, make, **kwargs)
    data = dict(kwargs.pop("data", ()))
    results = pool.run(
        run_whole, layout, loss, make, arguments, data, world_size=layout.world_size, timeout=120, **kwargs
    )
    found_weights = set()
    for rank, found in enumerate(results):
        for name in ("batches", "end", "seen"):
            assert_equal_trees(found[name], expected[name], path=f"rank {rank} {name}")
        for name, value in found["weights"].items():
            assert tensor_difference(value, expected["weights"][name]) < 1e-9, (rank, name)
        found_weights |= found["weights"].keys()
    assert found_weights == expected["weights"].keys()


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("loss", "layout"), [*COVERING, *(pytest.param(*case, marks=pytest.mark.nightly) for case in EVERYTHING)], ids=str
)
def test_like_one_device(pool: WorkerPool, loss: str, layout: Layout) -> None:
    check(pool, loss, layout)


FEATURES: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by norm": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"},
    "a sample in the last batch": {"data": (("num_samples", 9),)},
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("feature", FEATURES)
def test_with_what_a_trainer_does_besides(pool: WorkerPool, feature: str) -> None:
    loss = "root_of_mean" if "sample" in feature else "nt_xent"
    check(pool, loss, Layout("zb_h1", 2, 1, 3), **FEATURES[feature])


class FrozenStart(WholeBatchModel):
    """The end needs a value without gradient too."""

    def __init__(self, loss: str) -> None:
        super().__init__(loss)
        self.embed.requires_grad_(False)


class HardestSamples(WholeBatchModel):
    """Five samples out of the batch: the end fails on a microbatch, which has two."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, b, _ = batch
        hardest = (self(a) - b).square().sum(1).topk(5).values
        loss = hardest.mean().sqrt()
        self.log("train_loss", loss, on_step=True)
        return loss


class DrawsNoise(WholeBatchModel):
    """Numbers drawn before the units, which the end does not use; a dropout of nothing between units."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x + 0 * torch.randn_like(x))
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.0 if self.training else 0.5, self.training)
        return self.head(x)


class EditsItsBatch(WholeBatchModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2).add_(0.1)
        return super().training_step(batch, batch_idx)


class Buckets(WholeBatchModel):
    """Time before samples, and a value with a row for each sample and time."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, b, _ = batch
        z = self(torch.stack([a, b, a - b]))  # [3, samples, width]
        loss = (z[0] - z[1] * z[2]).square().mean().sqrt()
        self.log("train_loss", loss, on_step=True)
        return loss


class RowsOfOneSampleTogether(WholeBatchModel):
    """Two rows for each sample, side by side."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, b, _ = batch
        z = self(torch.stack([a, b], 1).flatten(0, 1)).unflatten(0, (-1, 2))
        loss = F.cross_entropy(z[:, 0] @ z[:, 1].T, torch.arange(len(a)))
        self.log("train_loss", loss, on_step=True)
        return loss


class MetricAndOutputs(WholeBatchModel):
    """A metric sees the batch once; so does who reads what the step returned."""

    def __init__(self, loss: str) -> None:
        super().__init__(loss)
        self.num_above, self.num_batches = SumMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self(batch[0])
        self.num_above.update((z > z.mean()).sum())
        self.num_batches.update(1)
        self.log("num_above", self.num_above, on_step=False, on_epoch=True)
        self.log("num_batches", self.num_batches, on_step=False, on_epoch=True)
        return {"loss": z.square().mean().sqrt(), "spread": z.std()}


WAYS = [MetricAndOutputs, FrozenStart, HardestSamples, DrawsNoise, EditsItsBatch, Buckets, RowsOfOneSampleTogether]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("model", WAYS)
def test_ways_of_a_step(pool: WorkerPool, model: Any) -> None:
    check(pool, "contrastive", Layout("zb_v", 2, 1, 4), model)


def stages_in_training() -> dict[str, int]:
    """In a worker: the stage of each unit."""
    strategy = Layout("1f1b", 2, 1, 4).strategy(whole_batch_loss=True)
    trainer = L.Trainer(**QUIET, precision="64-true", max_steps=1, limit_val_batches=0, devices=2, strategy=strategy)
    trainer.fit(HardestSamples("contrastive"), Pairs())
    return dict(strategy.engine.split.partition.stage_of_unit)


def test_the_plan_cuts_as_training_does_where_the_end_fails_on_a_microbatch(pool: WorkerPool) -> None:
    strategy = Layout("1f1b", 2, 1, 4).strategy(whole_batch_loss=True)
    strategy.num_nodes, strategy.parallel_devices = 1, [torch.device("cpu")] * 2

    def look(step: FirstStep) -> dict[str, int]:
        cutter = step.cutter(strategy.options, strategy.sizes)
        return dict(cutter.split(cutter.placement()).split.partition.stage_of_unit)

    planned = look_at_first_step({"precision": "64-true"}, HardestSamples("contrastive"), Pairs(), look)
    assert set(planned.values()) == {0, 1}
    for stages in pool.run(stages_in_training, world_size=2, timeout=60):
        assert stages == planned


@pytest.mark.by_day(1)
@pytest.mark.parametrize("arguments", [{"activation_checkpointing": True}, {"device_memory_gib": 1.0}], ids=str)
def test_with_other_arguments_of_the_strategy(pool: WorkerPool, arguments: dict[str, Any]) -> None:
    check(pool, "loss_module", Layout("zb_h1", 2, 1, 3), arguments=arguments)


def predictions(layout: Layout | None) -> Any:
    torch.manual_seed(5)
    module = Predicts("contrastive")
    chosen: dict[str, Any] = {"devices": 1}
    if layout is not None:
        chosen = {"devices": layout.world_size, "strategy": layout.strategy(whole_batch_loss=True)}
    trainer = L.Trainer(**QUIET, precision="64-true", use_distributed_sampler=False, **chosen)
    return trainer.predict(module, Pairs())


def test_predictions_have_a_row_per_sample(pool: WorkerPool) -> None:
    expected = predictions(None)
    for found in pool.run(predictions, Layout("1f1b", 2, 1, 3), world_size=2, timeout=60):
        assert_equal_trees(found, expected)


class Predicts(WholeBatchModel):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


# ---------------------------------------------------------------- replicas


def train_by_ddp(loss: str) -> dict[str, Any]:
    return run_whole(None, loss, strategy=DDPStrategy(process_group_backend="gloo"))


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("loss", "sharding"),
    [
        ("contrastive", "replicate"),
        ("tied", "full_shard"),
        pytest.param("tied", "replicate", marks=pytest.mark.nightly),
        pytest.param("contrastive", "full_shard", marks=pytest.mark.nightly),
        pytest.param("loss_module", "full_shard", marks=pytest.mark.nightly),
        pytest.param("loss_module", "replicate", marks=pytest.mark.nightly),
    ],
)
def test_replicas_are_those_of_ddp(pool: WorkerPool, loss: str, sharding: str) -> None:
    """The loss is that of each replica's batch, its gradients their mean."""
    by_ddp = pool.run(train_by_ddp, loss, world_size=2, timeout=120)
    layout = Layout("zb_h1", 2, 2, 2)
    arguments = {"sharding": sharding}
    results = pool.run(run_whole, layout, loss, WholeBatchModel, arguments, world_size=4, timeout=120)
    for rank, found in enumerate(results):
        expected = by_ddp[rank % 2]
        losses = [[batch["outputs"]["loss"] for batch in each["batches"]] for each in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
        for name, value in found["weights"].items():
            assert tensor_difference(value, expected["weights"][name]) < 1e-9, (rank, name)


# ---------------------------------------------------------------- refusals


class AuxiliaryInBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).tanh()
        return y, y.square().mean()


class AuxiliaryLoss(WholeBatchModel):
    """Every block gives a number of its own."""

    def __init__(self, loss: str) -> None:
        super().__init__(loss)
        self.blocks = nn.ModuleList(AuxiliaryInBlock() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, total = self.embed(batch[0]), 0.0
        for block in self.blocks:
            y, auxiliary = block(x)
            x, total = x + y, total + auxiliary
        return (self.head(x) - batch[1]).square().mean().sqrt() + total


class NoiseAtTheEnd(WholeBatchModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randn_like(batch[0])
        return (self(batch[0] + noise) - noise).square().mean().sqrt()


class CenteredBatch(WholeBatchModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] - batch[0].mean(0)
        return (self(x) - batch[1]).square().mean().sqrt()


class RowsInOneUnit(WholeBatchModel):
    """Two rows for each sample, and nothing says how they stand."""

    def __init__(self, loss: str) -> None:
        super().__init__(loss)
        self.embed = DoubleRows()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean().sqrt()


class DoubleRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x), self.linear(-x)])


class HookOnFeatures(WholeBatchModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self(batch[0])
        features.register_hook(lambda gradient: gradient * 0.5)
        return (features - batch[1]).square().mean().sqrt()


class FailsAtTheEnd(WholeBatchModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self(batch[0])
        if self.global_step == 1:
            raise ArithmeticError("the end of the second step")
        return features.square().mean().sqrt()


REFUSED: list[tuple[Any, str]] = [
    (
        AuxiliaryLoss,
        "output of the unit 'blocks.0' .* Its shape is \\(\\) for a microbatch and \\(\\) for the whole batch",
    ),
    (NoiseAtTheEnd, "uses random numbers that were drawn before the last unit"),
    (CenteredBatch, "An argument .* of the unit 'embed' .* has other values for the whole batch"),
    (RowsInOneUnit, "output of the unit 'embed' .* Its shape is .* these shapes do not show that dimension"),
    (HookOnFeatures, "puts a hook on the gradient of a tensor made before the end of the last unit"),
    (FailsAtTheEnd, "the end of the second step"),
]


@pytest.mark.by_day(2)
@pytest.mark.parametrize(("model", "message"), REFUSED, ids=[model.__name__ for model, _ in REFUSED])
def test_what_cannot_be_is_refused_and_nothing_hangs(pool: WorkerPool, model: Any, message: str) -> None:
    layout = Layout("zb_h1", 2, 1, 4)
    report = pool.run(run_whole, layout, "contrastive", model, world_size=2, timeout=60, expect_failure=True)
    assert all(failure is not None for failure in report.failures)
    texts = [str(failure) for failure in report.failures]
    assert any(re.search(message, text, re.DOTALL) for text in texts), texts
    assert report.seconds < 40
