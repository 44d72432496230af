"""Sizes of the mesh and numbers of microbatches."""

from __future__ import annotations

import pytest
import torch

from lightning_pp.distributed.sizes import ParallelSizes, resolve_num_microbatches
from lightning_pp.errors import ConfigurationError


@pytest.mark.parametrize(
    ("pipeline", "data", "world", "expected"),
    [("auto", "auto", 4, (4, 1)), (2, "auto", 8, (2, 4)), ("auto", 2, 8, (4, 2)), (3, 2, 6, (3, 2)), (1, 1, 1, (1, 1))],
)
def test_sizes_fill_the_world(pipeline: object, data: object, world: int, expected: tuple[int, int]) -> None:
    sizes = ParallelSizes.resolve(pipeline, data, world)  # type: ignore[arg-type]
    assert (sizes.pipeline, sizes.data_parallel) == expected


@pytest.mark.parametrize(
    ("pipeline", "data", "world", "numbers"),
    [
        (2, 3, 8, "2 x data_parallel_size=3 = 6.*8 devices"),
        (3, "auto", 8, "3.*8 devices"),
        ("auto", 5, 8, "5.*8 devices"),
    ],
)
def test_sizes_that_do_not_fit_say_the_numbers(pipeline: object, data: object, world: int, numbers: str) -> None:
    with pytest.raises(ConfigurationError, match=numbers):
        ParallelSizes.resolve(pipeline, data, world)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pipeline", "data", "expected"),
    [("auto", "auto", (4, 1)), (2, "auto", (2, 2)), ("auto", 2, (2, 2)), (1, 4, (1, 4))],
)
def test_sizes_share_what_tensor_ranks_leave(pipeline: object, data: object, expected: tuple[int, int]) -> None:
    sizes = ParallelSizes.resolve(pipeline, data, 8, tensor=2)  # type: ignore[arg-type]
    assert (sizes.pipeline, sizes.data_parallel, sizes.tensor) == (*expected, 2)
    # tensor ranks are neighbours, then replicas, then stages
    grid = torch.arange(8).reshape(*expected, 2)
    assert [tuple((grid == rank).nonzero()[0].tolist()) for rank in range(8)] == [
        sizes.coordinates(rank) for rank in range(8)
    ]


@pytest.mark.parametrize(
    ("pipeline", "data", "tensor", "numbers"),
    [
        (2, 1, 2, "=2 x data_parallel_size=1 x tensor_parallel_size=2 = 4, .* 8 devices"),
        ("auto", "auto", 3, "=1 x tensor_parallel_size=3 = 3 does not divide the 8 devices"),
        (1, 8, 0, "tensor_parallel_size=0 must be an integer"),
    ],
)
def test_tensor_sizes_that_do_not_fit_say_the_numbers(
    pipeline: object, data: object, tensor: int, numbers: str
) -> None:
    with pytest.raises(ConfigurationError, match=numbers):
        ParallelSizes.resolve(pipeline, data, 8, tensor=tensor)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "two"])
def test_size_must_be_a_positive_integer(size: object) -> None:
    with pytest.raises(ConfigurationError, match="pipeline_parallel_size"):
        ParallelSizes.resolve(size, "auto", 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "samples", "expected"),
    [(4, 64, 16), (4, 24, 12), (2, 10, 5), (2, 7, 7), (4, 13, 13), (4, 34, 16), (4, 3, 3), (1, 64, 1), (2, None, 8)],
)
def test_auto_microbatches_divide_the_batch_where_they_can(ranks: int, samples: int | None, expected: int) -> None:
    number = resolve_num_microbatches("auto", ranks, samples)
    assert number == expected
    if samples is not None and samples % number == 0 and ranks > 1 and samples >= 2 * ranks:
        assert 2 * ranks <= number <= 4 * ranks


@pytest.mark.parametrize(("samples", "expected"), [(64, 8), (8, 4), (10, 5), (7, 3), (4, 2), (2, 1), (1, 1)])
def test_auto_leaves_each_microbatch_the_samples_that_it_needs(samples: int, expected: int) -> None:
    number = resolve_num_microbatches("auto", 2, samples, fewest_samples=2)
    assert number == expected and samples // number >= min(2, samples)


def test_given_number_of_microbatches_is_kept() -> None:
    assert resolve_num_microbatches(7, 4, 64) == 7
    with pytest.raises(ConfigurationError, match="num_microbatches=0"):
        resolve_num_microbatches(0, 4, 64)


def test_replicate_size_splits_the_data_parallel_size() -> None:
    sizes = ParallelSizes.resolve(2, "auto", 16, 4)
    assert (sizes.data_parallel, sizes.data_parallel_replicate, sizes.data_parallel_shard) == (8, 4, 2)


@pytest.mark.parametrize(("replicate", "error"), [(3, "3 does not divide data_parallel_size=4"), (0, "=0 must be an")])
def test_replicate_size_that_does_not_divide(replicate: int, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        ParallelSizes.resolve(2, 4, 8, replicate)


@pytest.mark.parametrize(
    ("pipeline", "data", "replicate", "per_node", "expected"),
    [
        (2, 8, 1, 8, 1),  # a group is a node
        (4, 4, 1, 8, 1),  # two groups in a node
        (2, 16, 1, 8, 2),
        (1, 32, 1, 8, 4),
        (2, 16, 4, 8, 4),
        (2, 12, 1, 8, 3),  # groups of 12 cross nodes, and so do those of 6; of 4 they do not
        (2, 7, 1, 8, None),
        (16, 1, 1, 8, 1),
    ],
)
def test_fewest_copies_that_keep_shards_within_nodes(
    pipeline: int, data: int, replicate: int, per_node: int, expected: int | None
) -> None:
    sizes = ParallelSizes(pipeline, data, replicate)
    assert sizes.replicate_size_within_nodes(per_node) == expected

    def crosses(copies: int) -> bool:
        """Whether a group has ranks on two nodes, by going through all of them."""
        size = data // copies
        groups = [range(first, first + size) for first in range(0, pipeline * data, size)]
        return any(group[0] // per_node != group[-1] // per_node for group in groups)

    serve = [copies for copies in range(replicate, data + 1) if data % copies == 0 and not crosses(copies)]
    assert serve[0] == (data if expected is None else expected)
