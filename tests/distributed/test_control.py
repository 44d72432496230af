"""Messages of any length, and errors, between the ranks of a pipeline and between replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_pipeline import grid
from pool import WorkerPool

from lightning_pp.distributed.control import ControlGroups, make_control_groups


class StubbornError(Exception):
    """Pickles, but does not come back."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def exchange_lengths(lengths: list[int]) -> tuple[list[bytes], list[list[bytes]]]:
    groups = grid(2, 1)
    shared = [groups.share(lambda length=length: bytes([groups.replica]) * length, "bytes") for length in lengths]
    gathered = [
        groups.gather(bytes([groups.replica]) * (length + 5000 * groups.replica), "bytes") for length in lengths
    ]
    return shared, gathered


def test_messages_of_every_length_arrive(pool: WorkerPool) -> None:
    lengths = [0, 1, 4000, 4060, 4070, 4080, 4088, 4089, 4096, 9000, 100_000]
    ranks = pool.run(exchange_lengths, lengths, world_size=4, process_group=True)
    for rank, (shared, gathered) in enumerate(ranks):
        assert shared == [bytes([rank // 2]) * length for length in lengths]
        assert gathered == [[b"\0" * length, b"\1" * (length + 5000)] for length in lengths]


def share_a_failure(kind: str) -> Any:
    groups = grid(1, 1)

    def produce() -> Any:
        if kind == "stubborn":
            raise StubbornError(1, 2)
        raise KeyError("missing")

    return groups.share(produce, "a value")


@pytest.mark.parametrize(
    ("kind", "first", "last"), [("stubborn", "RuntimeError", "StubbornError"), ("", "KeyError", "KeyError")]
)
def test_a_failure_of_the_last_stage_is_everybodys(pool: WorkerPool, kind: str, first: str, last: str) -> None:
    report = pool.run(share_a_failure, kind, world_size=2, process_group=True, expect_failure=True)
    assert [failure and failure.type for failure in report.failures] == [first, last]
    assert report.seconds < 30


def exchange_with_tensor_ranks() -> tuple[Any, ...]:
    groups = replace(make_control_groups(torch.arange(4).reshape(2, 1, 2), None), last_stage_rank=1)
    rank = dist.get_rank()
    shared = groups.share(lambda: rank, "a number")
    return shared, groups.gather_in_pipeline(rank), groups.all_or_none(lambda: rank, "a number"), groups.is_last_stage


def test_the_last_stage_tells_its_tensor_ranks_too(pool: WorkerPool) -> None:
    ranks = pool.run(exchange_with_tensor_ranks, world_size=4, process_group=True)
    assert ranks == [(2, [0, 1, 2, 3], [0, 2], rank >= 2) for rank in range(4)]


def gather_at_two_places() -> Any:
    groups = grid(2, 1)
    return groups.gather((1, 2, 3)[: 2 + groups.replica], ("an epoch", "a batch")[groups.replica])


def test_replicas_at_different_places_are_told_where_they_are(pool: WorkerPool) -> None:
    report = pool.run(gather_at_two_places, world_size=4, process_group=True, expect_failure=True)
    assert [failure and failure.type for failure in report.failures] == ["ConfigurationError"] * 4
    for failure in report.failures:
        assert failure is not None
        assert "replica 0 reports an epoch, replica 1 reports a batch" in failure.message
    assert report.seconds < 30


def test_a_pipeline_of_one_needs_no_process_group() -> None:
    groups = ControlGroups()
    assert groups.is_last_stage
    assert (groups.pipeline_size, groups.num_replicas, groups.replica) == (1, 1, 0)
    assert groups.share(lambda: 3, "three") == 3
    assert groups.gather(4, "four") == [4]


def test_the_last_stage_is_a_rank_of_the_pipeline() -> None:
    with pytest.raises(ValueError, match="last_stage_rank=1 is not a rank of a pipeline of 1 ranks"):
        ControlGroups(last_stage_rank=1)
