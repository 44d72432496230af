"""A pipeline over channels that know no tags and connect at their first message trains like any other.

So does NCCL, which needs a device for each rank. Here such channels are made of gloo's: both sides of the first message
wait on the host until the other has come to it, tags are left out, and each direction of each pair of ranks has a group
of its own. Sends and posted receives occupy the device, as large messages do: at every action the rank drains it, as
loading a kernel or freeing memory does, and waits until all that it has posted is there, and until receives are posted
for all that it has sent. Gloo's sends end no earlier, whatever their size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from parity_run import Layout, Outcome, Settings, check_like_one_device, train
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Stop
from lightning_pp.split.record.step_record import Value


class ConnectingChannel:
    """A group of two whose first message waits for the other side, on the host."""

    patience_s = 60.0

    def __init__(self, group: dist.ProcessGroup, key: str) -> None:
        self._group = group
        self._key = key
        self._is_connected = False

    def _connect(self, tensors: list[Tensor], tag: int) -> None:
        assert tag == 0 and tensors[0].dtype != torch.int16 and not tensors[0].is_complex()
        if self._is_connected:
            return
        store = dist.distributed_c10d._get_default_store()
        store.add(self._key, 1)
        deadline = time.monotonic() + self.patience_s
        while store.add(self._key, 0) < 2:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody came to the first message of {self._key}")
            time.sleep(0.001)
        self._is_connected = True

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._connect(tensors, tag)
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._connect(tensors, tag)
        return self._group.recv(tensors, peer, tag)

    def abort(self) -> None:
        self._group.abort()

    def shutdown(self) -> None:
        self._group.shutdown()


class ChannelTransport(Transport):
    """The transport as it is over NCCL."""

    made = itertools.count()

    def __init__(self, *args: Any) -> None:
        self._number = next(self.made)
        super().__init__(*args, matches_by_tag=False)

    def _new_channel(self, channel: tuple[int, int]) -> Any:
        ranks = tuple(self._ranks[place] for place in channel)
        return ConnectingChannel(super()._new_channel(channel), f"{self._number}: {ranks}")

    patience_s = 60.0

    def post(self, stop: Stop) -> None:
        super().post(stop)
        self._drain_device()

    def receive(self, stop: Stop) -> list[tuple[Value, Tensor]]:
        received = super().receive(stop)
        self._drain_device()
        return received

    def _drain_device(self) -> None:
        """Gloo's works are waited for once."""
        patience = timedelta(seconds=self.patience_s)
        for tag, (work, tensor) in self._posted.items():
            if work is not None:
                work.wait(patience)
                self._posted[tag] = (None, tensor)
        for sends in (self._sends._of_last_step, self._sends._of_step):
            for send in itertools.chain(*sends.values()):
                if send.work is not None:
                    send.work.wait(patience)
                    send.work = None


class EagerTransport(ChannelTransport):
    """The same, with receives posted as where they occupy nothing."""

    patience_s = 3.0
    matches_by_tag = True


class UnopenedTransport(EagerTransport):
    """The same, where the first message of a channel is whatever comes first."""

    def _open(self, channel: tuple[int, int]) -> None:
        pass


@contextmanager
def channels_of(kind: type[ChannelTransport]) -> Iterator[None]:
    ChannelTransport.made = itertools.count()  # workers are used again
    with (
        patch("lightning_pp.strategy.connection.Transport", kind),
        patch.object(ConnectingChannel, "patience_s", 3.0 if kind is UnopenedTransport else 60.0),
    ):
        yield


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
    ("residual_mlp", Layout("1f1b", 2, 1, 3)),
    ("residual_mlp", Layout("zb_h1", 2, 2, 3)),
    ("residual_mlp", Layout("auto", 3, 1, 4)),  # searches again between two steps
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


@pytest.mark.by_day(2)
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_training_is_that_of_one_device(pool: WorkerPool, model: str, layout: Layout) -> None:
    settings = Settings(model, accumulate=2, clip_val=0.05, clip_algorithm="norm")
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
    settings, layout = Settings("residual_mlp"), Layout(schedule, 2, 2, 4)
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
    report = pool.run(evaluate_over_channels, "1f1b", 1.0, world_size=2, expect_failure=True)
    for failure in report.failures:
        assert failure is not None and "keeps every rank within device_memory_gib=1 under 1f1b" in failure.message
        assert " 2 of communicators" in failure.message, failure


@pytest.mark.nightly
def test_receives_that_are_posted_too_early_keep_the_device_for_ever(pool: WorkerPool) -> None:
    settings, layout = Settings("residual_mlp"), Layout("1f1b", 2, 1, 3)
    report = pool.run(
        train_over_channels,
        EagerTransport,
        settings,
        layout,
        world_size=layout.world_size,
        grace=6,
        expect_failure=True,
    )
    assert any(failure and "imed out" in str(failure) for failure in report.failures)


@pytest.mark.nightly
def test_channels_that_nobody_opens_hang(pool: WorkerPool) -> None:
    settings, layout = Settings("residual_mlp"), Layout("1f1b", 2, 1, 3)
    report = pool.run(
        train_over_channels,
        UnopenedTransport,
        settings,
        layout,
        world_size=layout.world_size,
        grace=2,
        expect_failure=True,
    )
    assert any(failure and "nobody came to the first message" in str(failure) for failure in report.failures)
