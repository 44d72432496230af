"""Each tensor rank sends its part of what crosses between stages: fewer bytes, and the training of one device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from parity_run import Layout, Outcome, Settings, check_like_one_device, merged, train_pipelined
from pool import WorkerPool
from torch import Tensor
from waiting_channels import ChannelTransport

from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Message

SETTINGS: Any = {"accumulate": 2, "optimizer": "adamw", "num_samples": 22, "max_epochs": 1, "only_trains": True}


class CountedGroup:
    """Counts the bytes that are sent through a group."""

    num_bytes = 0

    def __init__(self, group: Any) -> None:
        self.group = group

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        CountedGroup.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return self.group.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self.group.recv(tensors, peer, tag)


class CountedTransport(Transport):
    def _lay_out(self, message: Message) -> Any:
        lane = super()._lay_out(message)
        return lane._replace(group=CountedGroup(lane.group))


class CountedChannels(CountedTransport, ChannelTransport):
    """As over NCCL."""


def train_counted(
    settings: Settings,
    layout: Layout,
    options: dict[str, Any],
    base: type[Transport] = CountedTransport,
    least_bytes_in_parts: int = 0,  # tensors of tests are small
) -> tuple[Outcome, int]:
    """In a worker: also the bytes that this rank sent to other stages."""
    CountedGroup.num_bytes = 0
    with (
        patch("lightning_pp.split.record.step_record.LEAST_BYTES_IN_PARTS", least_bytes_in_parts),
        patch("lightning_pp.strategy.connection.Transport", base),
    ):
        return train_pipelined(settings, layout, options), CountedGroup.num_bytes


CASES: list[Any] = [("short_llama", "zb_v", True)]
CASES += [
    pytest.param(*case, marks=pytest.mark.nightly)
    for case in (
        ("gpt2_float64_loss", "1f1b", False),  # by day the bytes of the next test
        ("gpt2_float64_loss", "zb_v", True),
        ("llama_float64_loss", "1f1b", False),
        ("llama_float64_loss", "zb_v", True),
        ("t5", "1f1b", True),  # its mask goes in parts as well
        ("t5", "zb_v", False),
    )
]


@pytest.mark.parametrize(("model", "schedule", "sequence_parallel"), CASES)
def test_half_of_the_bytes_cross(pool: WorkerPool, model: str, schedule: str, sequence_parallel: bool) -> None:
    settings, layout = Settings(model, **SETTINGS), Layout(schedule, 2, 1, 3, tensor=2)
    alone = Layout(schedule, 2, 1, 3)
    whole = [num_bytes for _, num_bytes in pool.run(train_counted, settings, alone, {}, world_size=2, timeout=200)]
    options = {"sequence_parallel": sequence_parallel}
    told = pool.run(train_counted, settings, layout, options, world_size=4, timeout=300)
    assert whole[0] > 0 < whole[1]
    assert [num_bytes for _, num_bytes in told] == [whole[0] / 2, whole[0] / 2, whole[1] / 2, whole[1] / 2]
    check_like_one_device([outcome for outcome, _ in told], settings, layout)


def test_the_numbers_are_those_of_whole_messages_bit_for_bit(pool: WorkerPool) -> None:
    settings, layout = Settings("residual_mlp", **SETTINGS), Layout("zb_v", 2, 1, 3, tensor=2)
    runs = [
        pool.run(train_counted, settings, layout, {}, CountedTransport, least, world_size=4, timeout=200)
        for least in (1 << 40, 0)
    ]
    whole, parts = (merged([outcome for outcome, _ in told], layout) for told in runs)
    of_whole, of_parts = ([num_bytes for _, num_bytes in told] for told in runs)
    assert of_parts == [num_bytes / 2 for num_bytes in of_whole] and min(of_parts) > 0
    assert parts.losses == whole.losses
    assert all(value.equal(whole.weights[name]) for name, value in parts.weights.items())


@pytest.mark.parametrize("schedule", ["zb_v", pytest.param("1f1b", marks=pytest.mark.nightly)])
def test_parts_go_through_channels_that_wait(pool: WorkerPool, schedule: str) -> None:
    settings, layout = Settings("residual_mlp", **SETTINGS), Layout(schedule, 2, 1, 4, tensor=2)
    told = pool.run(train_counted, settings, layout, {}, CountedChannels, world_size=4, timeout=200)
    assert all(num_bytes > 0 for _, num_bytes in told)
    check_like_one_device([outcome for outcome, _ in told], settings, layout)
