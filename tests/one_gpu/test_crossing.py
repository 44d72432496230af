"""An encoder with a decoder under ``zb_v``: large messages, devices drained before each action, memory of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from one_device import PATIENCE, TIMEOUT_S, take_place
from pool import WorkerPool
from torch import Tensor, nn
from waiting_channels import ChannelTransport, channels_of

from lightning_pp import PipelineParallelStrategy
from lightning_pp.doctor.checks.trainings import Notes, difference, loader, train_alone, trainer_for
from lightning_pp.doctor.findings import Rank
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Stop
from lightning_pp.schedule.simulation.messages import message_peaks

Record = Callable[[str, object], None]
WIDTH, NUM_RANKS, NUM_MICROBATCHES = 64, 4, 4
MIB = 1 << 20


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Decoder(Encoder):
    def forward(self, x: Tensor, code: Tensor) -> Tensor:  # type: ignore[override]
        return x + torch.tanh(self.linear(x) * code)


class Translator(pl.LightningModule):
    """Each unit of the decoder reads the code, so that it goes from the last of the encoder to all of their stages."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.encoder = nn.ModuleList(Encoder() for _ in range(num_blocks))
        self.decoder = nn.ModuleList(Decoder() for _ in range(num_blocks))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        code, y = batch
        for block in self.encoder:
            code = block(code)
        x = y
        for block in self.decoder:
            x = block(x, code)
        return nn.functional.mse_loss(x, y.roll(1, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class DrainedTransport(Transport):
    """Waits for the device before each action, once its receives are posted, and before what they bring is used."""

    def post(self, stop: Stop) -> None:
        super().post(stop)
        torch.cuda.synchronize()

    def receive(self, stop: Stop) -> Any:
        received = super().receive(stop)
        torch.cuda.synchronize()
        return received


def drained(device_type: str) -> Any:
    """On a CPU by channels that wait at each action for all that is posted and sent."""
    if device_type == "cpu":
        return channels_of(ChannelTransport)
    return patch("lightning_pp.strategy.connection.Transport", DrainedTransport)


def batches_of(message_bytes: int, number: int) -> list[Any]:
    """Batches of which each microbatch, and each message, has that many bytes."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, NUM_MICROBATCHES, message_bytes // (4 * WIDTH), WIDTH)
    return [tuple(torch.randn(shape, generator=generator)) for _ in range(number)]


def trained(rank: Rank, data: list[Any]) -> tuple[pl.Trainer, Notes]:
    notes = Notes()
    options = {"schedule": "zb_v", "num_microbatches": NUM_MICROBATCHES, "check_first_batches": False}
    trainer = trainer_for(rank, callbacks=[notes], timeout=PATIENCE, **options)
    trainer.fit(Translator(), loader(data))
    return trainer, notes


def fit_drained(device_type: str, message_bytes: int) -> tuple[float, str]:
    """In a worker: how far the weights of this rank are from those of one device."""
    rank, data = take_place(device_type), batches_of(message_bytes, 2)
    with drained(device_type):
        _, notes = trained(rank, data)
    expected = train_alone(Translator(), data, rank.device, bf16=False)  # type: ignore[arg-type]
    return difference(notes, expected, Translator())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device_type", "message_bytes"),
    [
        ("cpu", MIB // 4),
        pytest.param("cpu", 16 * MIB, marks=pytest.mark.nightly),
        pytest.param("cuda", 16 * MIB, marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cpu-16MiB", "cuda-16MiB"],
)
def test_devices_that_are_drained_before_each_action(
    pool: WorkerPool, record_property: Record, device_type: str, message_bytes: int
) -> None:
    told = pool.run(fit_drained, device_type, message_bytes, world_size=NUM_RANKS, timeout=TIMEOUT_S)
    worst, name = max(told)
    record_property("figure", f"messages of {message_bytes / MIB:g} MiB; weights moved apart by {worst:.1e}")
    assert worst < 1e-3, name


class Counts:
    """Bytes of messages on this rank: those with a posted receive, and those sent and not let go of."""

    def __init__(self) -> None:
        self.posted = self.most_posted = self.most_sent = self.most = 0

    @contextmanager
    def kept(self, base: type[Transport]) -> Iterator[None]:
        """Within, transports count."""
        counts = self

        class CountedTransport(base):  # type: ignore[misc, valid-type]
            def _drain_device(self) -> None:
                """Ranks run ahead of each other."""

            def _count(self) -> None:
                posted = sum(tensor.nbytes for _, tensor in self._posted.values())
                sends = (self._sends._of_last_step, self._sends._of_step)
                under_way = [send.tensor for each in sends for queue in each.values() for send in queue]
                sent = sum(tensor.nbytes for tensor in under_way if tensor is not None)
                counts.most_posted = max(counts.most_posted, posted)
                counts.most_sent = max(counts.most_sent, sent)
                counts.most = max(counts.most, posted + sent)

            def post(self, stop: Stop) -> None:
                super().post(stop)
                self._count()

            def send(self, stop: Stop, tensors: Any) -> None:
                super().send(stop, tensors)
                self._count()

        with channels_of(CountedTransport):  # type: ignore[arg-type]
            yield


def count_messages(device_type: str, message_bytes: int) -> tuple[int, int, int, int]:
    """In a worker: the most bytes of posted messages, of sent ones, and of both; and what the plan counts."""
    rank, counts = take_place(device_type), Counts()
    with counts.kept(ChannelTransport if device_type == "cpu" else Transport):
        trainer, _ = trained(rank, batches_of(message_bytes, 3))
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineParallelStrategy) and strategy.engine.last_training_step is not None
    schedule, split = strategy.engine.last_training_step[0], strategy.engine.split
    edges = [(e.source, e.target, *[e.spec.num_bytes] * 2, e.has_gradient) for e in split.step_plan().edges]
    return counts.most_posted, counts.most_sent, counts.most, message_peaks(schedule, edges)[strategy.engine.rank]


@pytest.mark.parametrize(
    ("device_type", "message_bytes"),
    [("cpu", MIB // 4), pytest.param("cuda", 16 * MIB, marks=pytest.mark.gpu)],
    ids=["cpu", "cuda"],
)
def test_messages_hold_what_the_plan_counts(
    pool: WorkerPool, record_property: Record, device_type: str, message_bytes: int
) -> None:
    found = pool.run(count_messages, device_type, message_bytes, world_size=NUM_RANKS, timeout=TIMEOUT_S)
    told = [tuple(round(number / message_bytes, 1) for number in of_rank) for of_rank in found]
    record_property("figure", f"messages posted, sent, both, planned, by rank: {told}")
    for posted, _, both, planned in found:
        assert 0 < posted <= both <= planned
