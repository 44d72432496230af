"""A pipeline over channels that know no tags and connect at their first message trains like any other.

So does NCCL, which needs a device for each rank. Here such channels are made of gloo's (:mod:`waiting_channels`).
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from parity_run import Layout, Outcome, Settings, check_like_one_device, train
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from waiting_channels import ChannelTransport, EagerTransport, channels_of

from lightning_pp import PipelineParallelStrategy


def train_over_channels(
    kind: type[ChannelTransport], settings: Settings, layout: Layout, sharding: str = "shard_grad_op"
) -> Outcome:
    """In a worker: trains over such a transport."""
    with channels_of(kind):
        return train(settings, layout.strategy(sharding=sharding, check_first_batches=False), layout.world_size)


class Evaluated(Blocks):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def evaluate_over_channels(schedule: str | None, limit_gib: float = 64.0) -> tuple[float, Tensor]:
    """In a worker, whose device has 2 GiB less after channels to neighbours: trains, validates and predicts.

    Without a schedule on one device.
    """
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=4)
    strategy = "auto" if schedule is None else PipelineParallelStrategy(
        2, 1, 2, schedule=schedule, device_memory_gib=limit_gib
    )  # fmt: skip
    module = Evaluated()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if schedule is None else 2, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    free = itertools.cycle((10 << 30, 8 << 30))
    with (
        channels_of(ChannelTransport),
        patch("lightning_pp.runtime.transport.channels.free_bytes", lambda _: next(free)),
    ):
        trainer.fit(module, batches, batches)
        predicted = torch.cat(trainer.predict(module, batches))
    return float(trainer.callback_metrics.get("val_loss", 0.0)), predicted


LAYOUTS: list[Any] = [
    ("residual_mlp", Layout("auto", 3, 1, 4)),  # searches again between two steps
    ("residual_mlp", Layout("1f1b", 2, 1, 3)),
    ("residual_mlp", Layout("zb_h1", 2, 2, 3)),
    ("unet", Layout("zb_v", 2, 1, 4)),
    ("t5", Layout("v_half", 3, 1, 4)),
]
LAYOUTS += [
    pytest.param(*case, marks=pytest.mark.nightly)
    for case in (
        ("residual_mlp", Layout("interleaved_1f1b", 2, 1, 3)),
        ("unet", Layout("zb_h1", 4, 1, 3)),
        ("t5", Layout("dualpipe_v", 2, 1, 4)),
    )
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_training_is_that_of_one_device(pool: WorkerPool, model: str, layout: Layout) -> None:
    only_trains = layout.schedule == "auto"
    clipped = {"accumulate": 2, "clip_val": 0.05, "clip_algorithm": "norm", "num_samples": 22}
    settings = Settings(model, **clipped, only_trains=only_trains)
    outcomes = pool.run(
        train_over_channels, ChannelTransport, settings, layout, world_size=layout.world_size, timeout=120
    )
    check_like_one_device(outcomes, settings, layout)


FAMILIES = [
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"
]  # fmt: skip
BY_DAY = {("zb_v", "full_shard")}


@pytest.mark.parametrize(
    ("schedule", "sharding"),
    [
        pytest.param(schedule, sharding, marks=[] if (schedule, sharding) in BY_DAY else pytest.mark.nightly)
        for schedule in FAMILIES
        for sharding in ("replicate", "shard_grad_op", "full_shard")
    ],
)
def test_replicas_train_as_one_device_in_every_sharding(pool: WorkerPool, schedule: str, sharding: str) -> None:
    settings, layout = Settings("residual_mlp", only_trains=True), Layout(schedule, 2, 2, 4)
    outcomes = pool.run(
        train_over_channels, ChannelTransport, settings, layout, sharding, world_size=layout.world_size, timeout=120
    )
    check_like_one_device(outcomes, settings, layout)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.nightly), "zb_v"])
def test_evaluation_is_that_of_one_device(pool: WorkerPool, schedule: str) -> None:
    ((_, expected),) = pool.run(evaluate_over_channels, None, world_size=1)
    for _, predicted in pool.run(evaluate_over_channels, schedule, world_size=2, timeout=120):
        torch.testing.assert_close(predicted, expected)


class Typed(nn.Module):
    """Hands on numbers of which NCCL knows nothing: 16-bit integers, and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, whole: Tensor, turned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + torch.tanh(self.linear(x)) + 0.01 * whole.to(x.dtype) + turned.imag
        return x, (100 * x.detach()).to(torch.int16), torch.complex(x, 0.1 * x)


class TypedBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Typed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        whole, turned = torch.zeros_like(x, dtype=torch.int16), torch.complex(x, x)
        for block in self.blocks:
            x, whole, turned = block(x, whole, turned)
        return self.head(x).squeeze(-1)


def train_typed(schedule: str | None) -> dict[str, Tensor]:
    """In a worker: the weights that this rank has after a training; without a schedule on one device."""
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    strategy = "auto" if schedule is None else PipelineParallelStrategy(2, 1, 2, schedule=schedule)
    module = TypedBlocks()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if schedule is None else 2, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, precision="64-true",
    )  # fmt: skip
    with channels_of(ChannelTransport):
        trainer.fit(module, DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=4))
    return {name: value.detach() for name, value in module.named_parameters() if value.device.type == "cpu"}


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.nightly), "zb_v"])
def test_numbers_that_the_backend_does_not_know(pool: WorkerPool, schedule: str) -> None:
    (expected,) = pool.run(train_typed, None, world_size=1)
    found: dict[str, Tensor] = {}
    for weights in pool.run(train_typed, schedule, world_size=2, timeout=120):
        found |= weights
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)


def test_channels_count_in_a_limit_of_memory(pool: WorkerPool) -> None:
    for message in pool.refusals(None, evaluate_over_channels, "1f1b", 1.0, world_size=2):
        assert "keeps every rank within device_memory_gib=1 under 1f1b" in message
        assert " 2 of communicators" in message


@pytest.mark.nightly
def test_early_receives_keep_the_device_for_ever(pool: WorkerPool) -> None:
    run = train_over_channels, EagerTransport, Settings("residual_mlp"), Layout("1f1b", 2, 1, 3)
    report = pool.run(*run, world_size=2, grace=6, expect_failure=True)
    assert any(failure and "imed out" in str(failure) for failure in report.failures)
