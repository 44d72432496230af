"""Where cuts are after reshapes, against the indices themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_pp.tensor.cuts import Cut, CutError, reshaped, taken
from lightning_pp.tensor.parts import TensorPart, part_of, rank_pieces


def local(whole: torch.Tensor, cut: Cut, rank: int, num_ranks: int) -> torch.Tensor:
    return part_of(whole, TensorPart(cut.dim, whole.shape, rank_pieces(cut.segments, rank, num_ranks)))


SHAPES = [(2, 24), (2, 3, 8), (2, 3, 4, 2), (48,), (2, 1, 24), (6, 8), (2, 2, 12), (4, 12), (2, 8, 3), (1, 48), (48, 1)]
SEGMENTS = {24: [(24,), (8, 8, 8), (12, 12), (16, 8)], 8: [(8,), (4, 4)], 12: [(12,), (4, 4, 4)], 48: [(48,), (24, 24)]}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_reshapes_move_cuts_as_they_move_indices(num_ranks: int) -> None:
    num_moved = 0
    for before, after in itertools.permutations(SHAPES, 2):
        whole = torch.arange(48).view(before)
        for dim, size in enumerate(before):
            for segments in SEGMENTS.get(size, [(size,)]):
                if any(length % num_ranks for length in segments):
                    continue
                cut = Cut(dim, segments, frozenset())
                try:
                    moved = reshaped(cut, before, after, num_ranks)
                except CutError:
                    continue
                num_moved += 1
                for rank in range(num_ranks):
                    wanted = local(whole.view(after), moved, rank, num_ranks)
                    assert torch.equal(local(whole, cut, rank, num_ranks).reshape(wanted.shape), wanted)
    assert num_moved > 100


def test_a_split_between_segments_keeps_them() -> None:
    cut = Cut(1, (8, 4, 4), frozenset())
    assert taken(cut, 8, 16, 2) == (4, Cut(1, (4, 4), frozenset()))
    with pytest.raises(CutError, match=r"takes \[4, 16\) of a sharded dimension of 16"):
        taken(cut, 4, 16, 2)


def test_a_reshape_inside_a_segment_is_refused_with_sizes() -> None:
    with pytest.raises(
        CutError, match=r"reshapes \[2, 24\] to \[2, 3, 8\], where dimension 1 is sharded in 2"
    ) as caught:
        reshaped(Cut(1, (24,), frozenset(["qkv"])), (2, 24), (2, 3, 8), 2)
    assert caught.value.segments == ((0, 3), (1, 3), (2, 3), (3, 3))
