"""Ranks with different numbers of batches end with an error that names both numbers; none waits for ever."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from feature_parts import make_unchecked_trainer as make_trainer
from parity_run import Layout
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError

PIPELINE, REPLICAS = Layout("1f1b", 2, 1, 2), Layout("1f1b", 2, 2, 2)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, number: int, same: bool = False) -> None:
        self.number, self.same = number, same

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.number:
            raise IndexError
        return torch.full((8,), 1.0 if self.same else 1.0 + index, dtype=torch.float64), torch.tensor(
            1.0, dtype=torch.float64
        )


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Nobody can tell its length beforehand."""

    def __init__(self, number: int, same: bool = False) -> None:
        self.rows = Rows(number, same)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.rows[index] for index in range(self.rows.number))


class Evaluated(Blocks):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


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
    report = pool.run(run, layout, *args, world_size=layout.world_size, timeout=150.0, expect_failure=True)
    for rank, failure in enumerate(report.failures):
        assert failure is not None and re.search(pattern, failure.message), f"rank {rank} says {failure}"


@pytest.mark.parametrize("what", ["fit", "validation in a fit", pytest.param("validate", marks=pytest.mark.nightly)])
def test_ranks_of_a_pipeline(pool: WorkerPool, what: str) -> None:
    data = "training" if what == "fit" else "validation"
    check(pool, rf"Rank 0 has 3 batches of {data} data, but rank 1 has 2", PIPELINE, what, Rows, [3, 2])


def test_replicas(pool: WorkerPool) -> None:
    pattern = "Rank 0 has 3 batches of training data, but rank 1 has 2"
    check(pool, pattern, REPLICAS, "fit", Rows, [3, 2, 3, 2])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("numbers", [[4, 2], [2, 4]])
@pytest.mark.parametrize("what", ["fit", "validation in a fit", "validate"])
def test_data_without_a_length(pool: WorkerPool, what: str, numbers: list[int]) -> None:
    shorter = numbers.index(2)
    data = "training" if what == "fit" else "validation"
    told = rf"has 2 batches of {data} data, but rank {1 - shorter} has begun batch 3"
    check(pool, rf"This rank ended because (it|rank {shorter}) {told}", PIPELINE, what, Stream, numbers)


def run_two_epochs(numbers: list[int]) -> None:
    trainer = make_trainer(REPLICAS, max_epochs=2)
    trainer.fit(Blocks(), DataLoader(Stream(4 * numbers[trainer.global_rank % 2]), batch_size=4))


def test_replicas_whose_streams_end_apart(pool: WorkerPool) -> None:
    """One begins an epoch where the other is within one, and what they tell each other there can meet."""
    told = (
        r"Replicas are at different points of the run: replica 0 reports the first batch of an epoch, replica 1 reports"
    )
    report = pool.run(run_two_epochs, [2, 4], world_size=4, timeout=150.0, expect_failure=True)
    for rank, failure in enumerate(report.failures):
        assert failure is not None and re.search(told, failure.message), f"rank {rank} says {failure}"
    assert any('unequal_data="shortest"' in failure.message for failure in report.failures if failure is not None)


class Slow(Evaluated):
    """Takes longer to move a batch than the ranks take to look after each other, some times over."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        time.sleep(0.6)
        return batch


def run_slowly() -> dict[str, int]:
    counted = Counted()
    trainer = make_trainer(PIPELINE, max_epochs=1, callbacks=[counted])
    trainer.fit(Slow(), DataLoader(Stream(8), batch_size=4), DataLoader(Stream(8), batch_size=4))
    trainer.test(Slow(), DataLoader(Stream(8), batch_size=4))
    trainer.predict(Slow(), DataLoader(Stream(8), batch_size=4))
    return counted.numbers


@pytest.mark.nightly
def test_equal_data_whose_last_batch_is_late(pool: WorkerPool) -> None:
    """Lightning says that a batch is the last before it counts it."""
    for numbers in pool.run(run_slowly, world_size=PIPELINE.world_size):
        assert numbers == {"training": 2, "validation": 2, "test": 2, "prediction": 2}


class Counted(pl.Callback):
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.numbers[what] = self.numbers.get(what, 0) + 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.count("training")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.count("validation")

    def on_test_batch_end(self, *_: Any) -> None:
        self.count("test")

    def on_predict_batch_end(self, *_: Any) -> None:
        self.count("prediction")


def run_the_shortest(kind: Any, numbers: list[int]) -> tuple[dict[str, int], dict[str, Tensor]]:
    counted = Counted()
    strategy = PipelineParallelStrategy(
        2, 2, 2, sharding="replicate", unequal_data="shortest", check_first_batches=False
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=4, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, use_distributed_sampler=False, precision="64-true", callbacks=[counted],
    )  # fmt: skip
    # rows of 1.0 alone, so that replicas may hold different ones of them
    mine = DataLoader(kind(4 * numbers[trainer.global_rank], same=True), batch_size=4)
    module = Evaluated()
    trainer.fit(module, mine, mine)
    trainer.test(module, mine)
    trainer.predict(module, mine, return_predictions=False)
    return counted.numbers, {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}


def run_alone(number: int) -> dict[str, Tensor]:
    module = Evaluated()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        precision="64-true",
    )  # fmt: skip
    trainer.fit(module, DataLoader(Rows(8 * number, same=True), batch_size=8))
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("kind", [pytest.param(Rows, marks=pytest.mark.nightly), Stream])
def test_all_end_where_the_shortest_ends(pool: WorkerPool, kind: Any) -> None:
    expected = run_alone(2)
    # ranks 0 and 2 are the stages of one replica
    for numbers, weights in pool.run(run_the_shortest, kind, [4, 2, 4, 2], world_size=4):
        sanity_check = 2
        assert numbers == {"training": 4, "validation": 4 + sanity_check, "test": 2, "prediction": 2}
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-12)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unequal_data='longest' is unknown; it is one of error, shortest"):
        PipelineParallelStrategy(2, unequal_data="longest")  # type: ignore[arg-type]
