"""Groups that are used once before the first step; queues of a device; threads that have the device of their rank."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.groups import largest_of_all, warm_up
from lightning_pp.distributed.meshes import groups_of_collectives, make_meshes
from lightning_pp.distributed.messages import MessageLine
from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.strategy.device_queues import advise_pinned_memory, use_all_queues

CUDA = torch.device("cuda", 1)


def collectives_of(sizes: ParallelSizes) -> list[tuple[tuple[int, ...], int]]:
    """In a worker: the ranks of each group that is warmed up, and how many collectives it has run."""
    meshes = make_meshes("cpu", sizes)  # their groups are closed with them
    groups = groups_of_collectives(*meshes)
    calls: dict[tuple[int, ...], int] = {}

    def counted(name: str) -> Any:
        collective = getattr(dist, name)

        def call(*args: Any, group: dist.ProcessGroup) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            calls[ranks] = calls.get(ranks, 0) + 1
            return collective(*args, group=group)

        return patch.object(dist, name, call)

    with counted("all_gather_single"), counted("reduce_scatter_single"), counted("all_reduce"):
        warm_up(groups, torch.device("cpu"))
    return sorted(calls.items())


def test_every_group_of_collectives_is_used_once_and_none_along_the_pipeline(pool: WorkerPool) -> None:
    ranks = pool.run(collectives_of, ParallelSizes(2, 2), world_size=4, process_group=True)
    assert ranks[0] == ranks[1] == [((0, 1), 3), ((0, 1, 2, 3), 3)]
    assert ranks[2] == ranks[3] == [((0, 1, 2, 3), 3), ((2, 3), 3)]
    ranks = pool.run(collectives_of, ParallelSizes(1, 4, 2), world_size=4, process_group=True)
    # shards, replicas, and both
    assert [ranks for ranks, _ in ranks[0]] == [(0, 1), (0, 1, 2, 3), (0, 2)]
    assert [ranks for ranks, _ in ranks[3]] == [(0, 1, 2, 3), (1, 3), (2, 3)]
    ranks = pool.run(collectives_of, ParallelSizes(1, 2, 1, 2), world_size=4, process_group=True)
    # tensor ranks, replicas, and both
    assert {ranks for ranks, _ in ranks[0]} == {(0, 1), (0, 1, 2, 3), (0, 2)}
    assert {ranks for ranks, _ in ranks[3]} == {(0, 1, 2, 3), (1, 3), (2, 3)}


def taken_by_communicators() -> tuple[int, int]:
    """In a worker, whose device has less memory after the collectives than before: what it takes, and what ranks do."""
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    with patch("lightning_pp.distributed.groups.free_bytes", side_effect=[1000, 700 - rank]):
        taken = warm_up([world], torch.device("cpu"))
    return taken, largest_of_all(taken, torch.device("cpu"))


def test_what_communicators_take_is_that_of_the_rank_with_most(pool: WorkerPool) -> None:
    assert pool.run(taken_by_communicators, world_size=2, process_group=True) == [(300, 301), (301, 301)]


def taken_by_channels() -> tuple[int, int]:
    """In a worker, whose device has 100 bytes less for each channel: what those to neighbours take, and then more."""
    transport = Transport(range(3), dist.get_rank(), torch.device("cpu"), name="taken", matches_by_tag=False)
    with patch("lightning_pp.runtime.transport.channels.free_bytes", lambda _: 1000 - 100 * len(transport.channels)):
        return transport.open_neighbours(), transport.open_neighbours()


def test_what_channels_to_neighbours_take_is_measured(pool: WorkerPool) -> None:
    # a channel in each direction
    assert pool.run(taken_by_channels, world_size=3, process_group=True) == [(200, 0), (400, 0), (200, 0)]


@pytest.mark.parametrize(
    ("given", "has_begun", "set_to", "told"),
    [
        (None, False, "32", None),
        (None, True, None, "CUDA was used before the run"),
        ("32", True, "32", None),
        ("1", False, "1", "CUDA_DEVICE_MAX_CONNECTIONS=1 is set"),
    ],
)
def test_queues_of_a_device(
    given: str | None, has_begun: bool, set_to: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    with (
        patch("torch.cuda.is_initialized", return_value=has_begun),
        patch.dict(os.environ),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        use_all_queues(torch.device("cpu"))
        assert os.environ.get(name) == given
        use_all_queues(CUDA)
        assert os.environ.get(name) == set_to
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (told is not None) and all(told is not None and told in text for text in texts)


@pytest.mark.parametrize(
    ("device", "is_pinned", "is_told"), [("cpu", False, False), ("cuda:0", True, False), ("cuda:0", False, True)]
)
def test_batches_in_pageable_memory_are_told_on_a_device(device: str, is_pinned: bool, is_told: bool) -> None:
    batch = {"x": torch.zeros(2), "name": "text", "pair": [torch.zeros(3)]}
    with patch.object(torch.Tensor, "is_pinned", lambda _: is_pinned), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        advise_pinned_memory(batch, torch.device(device))
    assert ["pin_memory=True" in str(warning.message) for warning in caught] == [True] * is_told


def test_the_thread_of_messages_has_the_device_of_its_rank() -> None:
    with patch("torch.cuda.set_device") as chosen:
        line = MessageLine(ControlGroups(), CUDA)
        assert line.send(lambda: 3).result(timeout=30) == 3
        line.drain()
    chosen.assert_called_once_with(CUDA)
