"""Groups that two ranks make by themselves, while others do something else."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from lightning_pp.distributed._torch_private import channel_options
from lightning_pp.distributed.groups import pair_group, world_options
from lightning_pp.distributed.sizes import ParallelSizes

PAIRS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def exchange(with_others: bool) -> list[float]:
    """Each pair makes as many channels as its first rank's number, plus one; rank 3 has made groups before."""
    rank = dist.get_rank()
    if with_others and rank in (1, 3):  # numbers of groups differ between the two of a pair
        dist.new_group([rank], use_local_synchronization=True)
    pair = PAIRS[rank]
    got = []
    for number in range(pair[0] + 1):
        channel = pair_group(f"test {with_others}/{pair}/{number}", pair.index(rank), "cpu", timedelta(seconds=30))
        tensor = torch.tensor([10.0 * rank + number])
        if rank == pair[0]:
            channel.send([tensor], 1, 0).wait()
        else:
            channel.recv([tensor], 0, 0).wait()
        got.append(float(tensor))
        channel.shutdown()
    dist.barrier()
    return got


@pytest.mark.parametrize("with_others", [False, True])
def test_two_ranks_make_a_group_that_no_other_hears_of(pool: WorkerPool, with_others: bool) -> None:
    first, second, third, fourth = pool.run(exchange, with_others, world_size=4, process_group=True)
    assert first == second == [0.0]
    assert third == fourth == [20.0, 21.0, 22.0]


def wait_for_nobody() -> str:
    try:
        pair_group("test/nobody", 0, "cpu", timedelta(seconds=1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_nobody_comes_to_gives_up(pool: WorkerPool) -> None:
    (said,) = pool.run(wait_for_nobody, world_size=1, process_group=True)
    assert "1" in said and ("imeout" in said or "imed out" in said)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_a_channel_over_nccl_has_priority_and_few_multiprocessors() -> None:
    """Torch's own objects, which need no device; ``.ci/versions`` runs it with torch for CUDA."""
    options = channel_options("pipeline/0-1", timedelta(seconds=150))
    assert (options.is_high_priority_stream, options.group_name, options._timeout) == (
        True,
        "pipeline/0-1",
        timedelta(seconds=150),
    )
    assert (options.config.min_ctas, options.config.max_ctas) == (1, 4)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_the_group_of_all_ranks_takes_few_multiprocessors_where_only_numbers_go_through_it() -> None:
    options = world_options("nccl", ParallelSizes(2, 2))
    assert (options.config.min_ctas, options.config.max_ctas) == (1, 2)


def test_the_group_of_all_ranks_is_torch_own_where_parameters_go_through_it() -> None:
    assert world_options("nccl", ParallelSizes(1, 4)) is None
    assert world_options("gloo", ParallelSizes(2, 2)) is None
