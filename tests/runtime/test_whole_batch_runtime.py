"""Joining what microbatches give, and splitting its gradients: shapes, orders of rows, what has no such dimension."""

from __future__ import annotations

import pytest
import torch

from lightning_pp.runtime.whole_batch import joined_rows, split_rows
from lightning_pp.split.record.whole_batch import Join, RowOrders, find_join


@pytest.mark.parametrize(
    ("parts", "whole", "join"),
    [
        ([(3, 5), (2, 5)], (5, 5), Join(0)),
        ([(4, 3, 7), (4, 2, 7)], (4, 5, 7), Join(1)),
        ([(6, 5), (4, 5)], (10, 5), Join(0, 2)),
        ([(3, 3), (2, 2)], (5, 5), None),  # a similarity of samples
        ([(), ()], (), None),
        ([(7,), (7,)], (7,), None),  # the same for every microbatch: not a part of anything
        ([(3, 4), (2, 6)], (5, 6), None),  # padded to other lengths
        ([(4, 5), (6, 5)], (10, 5), None),  # adds up, and follows no number of samples
    ],
)
def test_the_dimension_of_samples_is_the_one_whose_sizes_add_up(
    parts: list[tuple[int, ...]], whole: tuple[int, ...], join: Join | None
) -> None:
    assert find_join(parts, whole, (3, 2)) == join


def test_one_part_is_the_whole() -> None:
    assert find_join([(7,)], (7,), (5,)) == Join(None)
    assert find_join([(7,)], (8,), (5,)) is None


@pytest.mark.parametrize("by_sample", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_stand_as_in_the_whole_batch(dim: int, by_sample: bool) -> None:
    num_samples, rows = (3, 2), 2
    samples = torch.arange(5 * 4.0).view(5, 4)
    views = [samples, samples + 100]

    def batch(part: torch.Tensor | slice) -> torch.Tensor:
        chosen = [view[part] for view in views]
        flat = torch.stack(chosen, 1).flatten(0, 1) if by_sample else torch.cat(chosen)
        return flat if dim == 0 else flat.T.contiguous()

    parts = [batch(slice(0, 3)), batch(slice(3, 5))]
    join, orders = Join(dim, rows), RowOrders(by_sample={rows: by_sample})
    joined = joined_rows(parts, join, num_samples, orders)
    torch.testing.assert_close(joined, batch(slice(None)))
    for part, found in zip(parts, split_rows(joined, join, num_samples, orders), strict=True):
        torch.testing.assert_close(found, part)
