"""Ranks with different numbers of batches end with an error that names both numbers; none waits for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from feature_parts import make_trainer
from parity_run import Layout
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

PIPELINE, REPLICAS = Layout("1f1b", 2, 1, 2), Layout("1f1b", 2, 2, 2)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.number:
            raise IndexError
        return torch.full((8,), 1.0 + index, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Nobody can tell its length beforehand."""

    def __init__(self, number: int) -> None:
        self.rows = Rows(number)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.rows[index] for index in range(self.rows.number))


def run(layout: Layout, what: str, kind: Any, numbers: list[int]) -> None:
    trainer = make_trainer(layout, enable_checkpointing=True)
    mine = DataLoader(kind(4 * numbers[trainer.global_rank]), batch_size=4)
    same = DataLoader(Rows(8), batch_size=4)
    if what == "fit":
        trainer.fit(Blocks(), mine)
    elif what == "validation in a fit":
        trainer.fit(Blocks(), same, mine)
    else:
        trainer.validate(Blocks(), mine)


def check(pool: WorkerPool, pattern: str, layout: Layout, *args: Any) -> None:
    report = pool.run(run, layout, *args, world_size=layout.world_size, timeout=60.0, expect_failure=True)
    for rank, failure in enumerate(report.failures):
        assert failure is not None and re.search(pattern, failure.message), f"rank {rank} says {failure}"


@pytest.mark.parametrize("what", ["fit", "validation in a fit", "validate"])
def test_ranks_of_a_pipeline(pool: WorkerPool, what: str) -> None:
    data = "training" if what == "fit" else "validation"
    check(pool, rf"Rank 0 has 3 batches of {data} data, and rank 1 has 2", PIPELINE, what, Rows, [3, 2])


def test_replicas(pool: WorkerPool) -> None:
    pattern = "Rank 0 has 3 batches of training data, and rank 1 has 2"
    check(pool, pattern, REPLICAS, "fit", Rows, [3, 2, 3, 2])


@pytest.mark.parametrize("numbers", [[4, 2], [2, 4]])
def test_data_without_a_length(pool: WorkerPool, numbers: list[int]) -> None:
    shorter = numbers.index(2)
    what = rf"has 2 batches of training data in epoch 0, and rank {1 - shorter} has begun batch 3"
    check(pool, rf"This rank ended because (it|rank {shorter}) {what}", PIPELINE, "fit", Stream, numbers)
