"""Ranks meet over a store in which processes of other attempts have left something; each hears what all tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
from torch.distributed import TCPStore

from lightning_pp.distributed.launcher_store import launcher_store
from lightning_pp.distributed.meeting import TextStore, meet

T = TypeVar("T")
LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=0.5)


class KilledError(Exception):
    """Stands for the end of a process."""


class MortalStore(TextStore):
    """Is no longer used after some calls, as by a process that is killed between two of them."""

    def __init__(self, store: TCPStore, num_calls: int) -> None:
        super().__init__(store, "test", "a store")
        self.num_calls = num_calls

    def write(self, name: str, text: str) -> None:
        self._call()
        super().write(name, text)

    def read(self, name: str) -> str | None:
        self._call()
        return super().read(name)

    def count(self, name: str, more: int = 1) -> int:
        self._call()
        return super().count(name, more)

    def _call(self) -> None:
        if self.num_calls == 0:
            raise KilledError
        self.num_calls -= 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(store.port))):
        monkeypatch.setenv(name, value)
    return store


def client(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def texts(server: TCPStore) -> TextStore:
    return TextStore(client(server), "test", f"the store (127.0.0.1:{server.port})")


def agreed_name(store: TextStore, rank: int, num_ranks: int, timeout: timedelta) -> str:
    name, told = meet(store, rank, num_ranks, timeout, f"I am {rank}, {rank}")
    assert told == [f"I am {each}, {each}" for each in range(num_ranks)]
    return name


def ended(future: Future[T]) -> T | BaseException:
    error = future.exception()
    return future.result() if error is None else error


def each_rank(num_ranks: int, agree: Callable[[int], str]) -> list[str | BaseException]:
    with ThreadPoolExecutor(num_ranks) as threads:
        return [ended(future) for future in [threads.submit(agree, rank) for rank in range(num_ranks)]]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ranks_of_an_attempt_get_one_name_and_each_time_another(server: TCPStore, num_ranks: int) -> None:
    stores = [texts(server) for _ in range(num_ranks)]
    seen: set[str | BaseException] = set()
    for _ in range(5):  # the same processes, one time after the other, without a barrier
        names = set(each_rank(num_ranks, lambda rank: agreed_name(stores[rank], rank, num_ranks, LONG)))
        assert len(names) == 1 and not names & seen
        seen |= names


@pytest.mark.by_day(2)
@pytest.mark.parametrize("seed", range(5))
def test_what_killed_processes_have_left_is_not_taken_for_an_answer(server: TCPStore, seed: int) -> None:
    """Each attempt is killed anywhere; the last is not, and comes in any order."""
    draw = random.Random(seed)
    earlier: set[str | BaseException] = set()
    for _ in range(4):
        dying = [MortalStore(client(server), draw.randrange(16)) for _ in range(3)]
        earlier |= set(each_rank(3, lambda rank, dying=dying: agreed_name(dying[rank], rank, 3, SHORT)))  # type: ignore[misc]
    with ThreadPoolExecutor(3) as threads:
        last = [threads.submit(agreed_name, texts(server), rank, 3, LONG) for rank in draw.sample(range(3), 3)]
    names = {future.result() for future in last}
    assert len(names) == 1 and not names & earlier


@pytest.mark.by_day(4)
@pytest.mark.parametrize("killed", [0, 1, 2])
@pytest.mark.parametrize("num_calls", range(0, 14, 3))
def test_one_process_started_anew_meets_those_that_wait(server: TCPStore, killed: int, num_calls: int) -> None:
    """As by torchrun's static rendezvous, which does not stop the processes of the other nodes."""
    mortal = MortalStore(client(server), num_calls)
    # connected before any waits: torch asks for the name of the other end, which takes 5 s where no name server answers
    stores = [texts(server) for _ in range(3)]

    def agree(rank: int) -> str:
        if rank != killed:
            return agreed_name(stores[rank], rank, 3, LONG)
        try:
            return agreed_name(mortal, rank, 3, LONG)
        except KilledError:
            return agreed_name(stores[rank], rank, 3, timedelta(seconds=3))

    names = each_rank(3, agree)
    given = {name for name in names if not isinstance(name, BaseException)}
    # killed after the others had left, it can only be late
    assert len(given) == 1 and (len(names) == 3), names
    assert all(isinstance(name, (str, TimeoutError)) for name in names), names
    if any(isinstance(name, TimeoutError) for name in names):
        assert [rank for rank, name in enumerate(names) if isinstance(name, TimeoutError)] == [killed], names


def test_who_does_not_come_is_told(server: TCPStore) -> None:
    stores = {rank: texts(server) for rank in (0, 2)}
    with ThreadPoolExecutor(2) as threads:
        first, last = (
            threads.submit(agreed_name, store, rank, 3, timedelta(seconds=1)) for rank, store in stores.items()
        )
    with pytest.raises(TimeoutError, match=rf"1 of 3 ranks \(1\) did not reach .*127.0.0.1:{server.port}"):
        first.result()
    with pytest.raises(TimeoutError, match=r"Rank 2 got no answer from rank 0 \(for all 3 ranks\)"):
        last.result()


def test_a_store_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch, server: TCPStore) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr("lightning_pp.distributed.launcher_store._CONNECT_SECONDS", 1.0)
    with pytest.raises(ConnectionError, match=r"The store of torchrun \(127.0.0.1:1\) did not answer within 1 s"):
        launcher_store()
