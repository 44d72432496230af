"""A rank that waits says which rank it waits for, since when that has not moved, and its stack; one says it for all."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from lightning_pp.distributed.watch.standstill import Standstill
from lightning_pp.distributed.watch.table import RankFailure, Table
from lightning_pp.distributed.watch.this_rank import Position, Stack, ThisRank

WAITS = Stack(waits=True, lines=("train.py:88 in <module>", "channels.py:150 in receive"))
WORKS = Stack(waits=False, lines=("train.py:88 in <module>", "train.py:41 in on_train_batch_end"))


class Rank:
    """What a rank asks and answers with, without a run."""

    def __init__(
        self,
        store: HashStore,
        rank: int,
        stack: Stack | Callable[[], Stack],
        timeout_s: float = 0.4,
        deadlock_s: float = 60.0,
    ) -> None:
        self.position = Position("batch 813 of training", "1F0", 0)
        self.failures: list[RankFailure] = []
        this_rank = ThisRank(
            rank,
            3,
            place=lambda: f"stage {rank}",
            position=lambda: self.position,
            progress=list,
            stack=stack if callable(stack) else lambda: stack,
            wake=lambda: None,
            exit_codes=dict,
            timeout_s=timeout_s,
            deadlock_s=deadlock_s,
        )
        self.standstill = Standstill(Table(store, 1, 3, rank), this_rank, self.failures.append)


def text_of(ranks: list[Rank], capsys: pytest.CaptureFixture[str], until: str) -> str:
    """What the ranks print while they look, up to ``until`` and for some more looks."""
    text, end = "", time.monotonic() + 30
    while until not in text and time.monotonic() < end:
        time.sleep(0.01)
        for rank in ranks:
            rank.standstill.look()
        text += capsys.readouterr().err
    for _ in range(20):
        for rank in ranks:
            rank.standstill.look()
    return text + capsys.readouterr().err


def test_a_rank_that_waits_says_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    ranks = [Rank(store, 0, WAITS), Rank(store, 1, WAITS), Rank(store, 2, WORKS)]
    ranks[2].position = Position("batch 812 of training", "", 0)
    text = text_of(ranks, capsys, "on_train_batch_end")
    assert text.count("has waited for") == 1 and "since batch 813 of training, 1F0. Rank 2 (stage 2) has not" in text
    assert "has not moved since batch 812 of training, for" in text
    assert "its stack: train.py:88 in <module> > train.py:41 in on_train_batch_end." in text
    for rank in ranks:
        rank.position = Position("batch 814 of training", "", 1)
    assert text_of(ranks, capsys, "on_train_batch_end").count("Rank 2 (stage 2) has not moved since batch 814") == 1


def test_where_all_wait_each_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    ranks = [Rank(store, number, WAITS) for number in range(3)]
    text = text_of(ranks, capsys, "has waited for")
    assert "No rank runs the user's code. Rank" in text and text.count("channels.py:150 in receive") == 2


def look_until(ranks: list[Rank], is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
        for rank in ranks:
            rank.standstill.look()


def test_after_a_time_out_the_rank_that_runs_the_users_code_is_the_failure() -> None:
    store = HashStore()
    ranks = [Rank(store, 0, WAITS), Rank(store, 1, WAITS), Rank(store, 2, WORKS)]
    time.sleep(0.3)  # half of the time-out, after which a rank keeps the others waiting
    look_until(ranks, ranks[1].standstill.ask())
    (failure,) = ranks[1].failures
    assert (failure.rank, failure.place, failure.is_gone) == (2, "stage 2", True)
    assert "kept the others waiting: it has not moved since batch 813 of training, 1F0, for" in failure.what
    assert failure.what.endswith("train.py:88 in <module> > train.py:41 in on_train_batch_end")
    assert not ranks[0].failures and not ranks[2].failures


def test_a_rank_that_waits_as_long_as_the_time_out_asks_though_nothing_is_raised() -> None:
    store = HashStore()
    ranks = [Rank(store, 0, WAITS), Rank(store, 1, WORKS, timeout_s=100.0), Rank(store, 2, WAITS, timeout_s=100.0)]
    look_until(ranks, lambda: bool(ranks[0].failures))
    (failure,) = ranks[0].failures
    assert failure.rank == 1 and "train.py:41 in on_train_batch_end" in failure.what
    look_until(ranks, lambda: True)
    assert not ranks[2].failures


def test_of_several_ranks_that_run_the_users_code_none_is_blamed() -> None:
    store = HashStore()
    ranks = [Rank(store, 0, WAITS), Rank(store, 1, WORKS), Rank(store, 2, WORKS)]
    time.sleep(0.3)
    look_until(ranks, ranks[0].standstill.ask())
    (failure,) = ranks[0].failures
    assert failure.rank is None and failure.what.startswith("several ranks have not moved")
    assert "Rank 1 (stage 1)" in failure.what and "Rank 2 (stage 2)" in failure.what


def test_after_a_time_out_a_rank_that_does_not_answer_is_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pp.distributed.watch.standstill._ANSWER_S", 0.5)
    store = HashStore()
    ranks = [Rank(store, 0, WAITS), Rank(store, 1, WAITS)]
    look_until(ranks, ranks[0].standstill.ask())
    (failure,) = ranks[0].failures
    assert str(failure) == "rank 2 does not answer, while others wait for it"


def test_after_a_time_out_in_which_all_waited_nobody_is_blamed() -> None:
    store = HashStore()
    ranks = [Rank(store, number, WAITS, timeout_s=100.0) for number in range(3)]
    look_until(ranks, ranks[2].standstill.ask())
    assert not any(rank.failures for rank in ranks)


def test_ranks_that_all_wait_in_one_call_are_a_deadlock_told_with_where_each_stands() -> None:
    store = HashStore()
    ranks = [Rank(store, number, WAITS, 100.0, deadlock_s=0.3) for number in range(3)]
    look_until(ranks, lambda: bool(ranks[0].failures))
    what = ranks[0].failures[0].what
    assert what.startswith("every rank has waited for the others for 0.3 s or longer (deadlock_seconds), each in one")
    assert [what.index(f"Rank {rank} (stage {rank})") for rank in range(3)] == sorted(
        what.index(f"Rank {rank} (stage {rank})") for rank in range(3)
    )


def test_a_rank_that_works_is_no_deadlock() -> None:
    store = HashStore()
    ranks = [Rank(store, 0, WAITS, 100.0, 0.1), Rank(store, 1, WORKS, 100.0, 0.1), Rank(store, 2, WAITS, 100.0, 0.1)]
    end = time.monotonic() + 2.5  # it asks each second
    look_until(ranks, lambda: time.monotonic() > end)
    assert not any(rank.failures for rank in ranks) and Table(store, 1, 3, 0).num_asked() >= 2


def test_the_stack_of_a_rank_that_moves_is_not_read() -> None:
    """Reading it keeps what its frames hold, so memory of a batch would last into the update."""
    store = HashStore()
    num_read = 0

    def read() -> Stack:
        nonlocal num_read
        num_read += 1
        return WAITS

    moving = Rank(store, 0, read)
    for moves in range(10):
        moving.position = Position("batch 813 of training", "1F0", moves + 1)
        moving.standstill.look()
    assert num_read == 0
    moving.standstill.look()
    assert num_read == 1
    Table(store, 1, 3, 1).ask()
    moving.position = Position("batch 814 of training", "1F0", 0)
    moving.standstill.look()
    assert num_read == 2
