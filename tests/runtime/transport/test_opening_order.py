"""The order in which channels are opened: the same for all, and as short for a long pipeline as for a short one."""

from __future__ import annotations

import itertools

import pytest

from lightning_pp.runtime.transport.channels import opening_order
from lightning_pp.schedule import build_schedule


def rounds(channels: list[tuple[int, int]]) -> int:
    """How often one opening comes after another, if each rank opens its own in order and both sides are needed."""
    done_at: dict[int, int] = {}
    for channel in channels:
        ends = 1 + max(done_at.get(rank, 0) for rank in channel)
        done_at.update(dict.fromkeys(channel, ends))
    return max(done_at.values())


def channels_of(name: str, num_ranks: int) -> set[tuple[int, int]]:
    ranks = build_schedule(name, num_ranks=num_ranks, num_microbatches=num_ranks).placement.rank_of_stage
    pairs = {pair for pair in itertools.pairwise(ranks) if pair[0] != pair[1]}
    return pairs | {pair[::-1] for pair in pairs}


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved_1f1b"])
def test_the_time_does_not_grow_with_the_pipeline(name: str) -> None:
    # two neighbours, two directions; the ring of an interleaved schedule closes with one channel more
    most = 6 if name == "interleaved_1f1b" else 4
    for num_ranks in (4, 8, 16, 64):
        channels = channels_of(name, num_ranks)
        assert rounds(opening_order(channels)) <= most
        assert rounds(sorted(channels)) > num_ranks / 2  # what it is compared with: one after the other


def test_each_rank_opens_in_the_order_of_all() -> None:
    everything = opening_order(set(itertools.permutations(range(7), 2)))
    assert len(everything) == 42
    for rank in range(7):
        mine = [channel for channel in everything if rank in channel]
        assert opening_order(mine) == mine
