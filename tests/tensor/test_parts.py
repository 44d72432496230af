"""Parts of parameters and the wholes gathered from them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pool import WorkerPool

from lightning_pp.tensor.parts import TensorPart, part_of, rank_pieces, whole_of


def gathered(segments: tuple[int, ...], dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert dist.group.WORLD is not None
    whole = torch.arange(72.0).view(6, 12)
    part = TensorPart(dim, whole.shape, rank_pieces(segments, dist.get_rank(), dist.get_world_size()))
    local = part_of(whole, part)
    assert local.is_contiguous() and local.shape == part.local_shape
    return whole, whole_of(local, part, dist.group.WORLD)


def test_parts_gather_to_the_whole(pool: WorkerPool) -> None:
    for segments, dim in (((12,), 1), ((4, 4, 4), 1), ((8, 4), 1), ((4, 2), 0)):
        for whole, again in pool.run(gathered, segments, dim, process_group=True):
            assert torch.equal(whole, again)


def test_parts_of_different_sizes_gather_to_the_whole(pool: WorkerPool) -> None:
    for whole, again in pool.run(gathered, (6,), 0, world_size=4, process_group=True):
        assert torch.equal(whole, again)


def test_a_rank_holds_its_share_of_each_segment() -> None:
    assert [rank_pieces((6,), rank, 4) for rank in range(4)] == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 6),)]
    assert rank_pieces((8, 4), 1, 4) == ((2, 4), (9, 10))
