"""A rank that waits says which rank it waits for, since when that has not moved, and its stack; one says it for all."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from lightning_pp.distributed.watch.failures import FailureBoard
from lightning_pp.distributed.watch.standstill import Patience, Position, Stack, Standstill

WAITS = Stack(waits=True, lines=("train.py:88 in <module>", "channels.py:150 in receive"))
WORKS = Stack(waits=False, lines=("train.py:88 in <module>", "train.py:41 in on_train_batch_end"))


class Rank:
    """What a rank asks and answers with, without a run."""

    def __init__(self, store: HashStore, rank: int, stack: Stack, timeout_s: float = 0.4) -> None:
        self.position = Position("batch 813 of training", "1F0", 0)
        board = FailureBoard(store, 1, 3, rank)
        self.standstill = Standstill(
            board, lambda: f"stage {rank}", lambda: self.position, lambda: stack, Patience(timeout_s, 60)
        )


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


def test_a_rank_that_is_asked_tells_where_it_stands() -> None:
    store = HashStore()
    asking, working, busy = Rank(store, 0, WAITS, 100.0), Rank(store, 1, WORKS, 100.0), Rank(store, 2, WAITS, 100.0)
    is_done = threading.Event()

    def answer() -> None:
        while not is_done.wait(0.01):
            working.standstill.look()
            busy.standstill.look()

    thread = threading.Thread(target=answer)
    thread.start()
    answers = asking.standstill.ask(lambda: False)
    is_done.set()
    thread.join()
    first, second = answers[1], answers[2]
    assert first is not None and second is not None
    assert (first.stack, first.since, first.place) == (WORKS, "batch 813 of training, 1F0", "stage 1")
    assert second.stack.waits and asking.standstill.ask(lambda: True) == {}
