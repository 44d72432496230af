"""The first failure of a run, told to every rank by the job's key-value store."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch.distributed as dist

_POLL_S = 0.05


class Store(Protocol):
    """What is used of a ``torch.distributed.Store``."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def append(self, key: str, value: str, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...


class RankStoppedError(RuntimeError):
    """What this rank waited for does not come: another rank has ended, or does not go on."""


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed.

    Attributes:
        rank: Global rank; None if it is that of all ranks.
        place: Where it is: host, pipeline, replica, stages; and what it was doing.
        what: What happened to it, as a part of a sentence: ``raised ValueError: ...``, ``was killed by SIGKILL``.
        lines: The user's lines that led there, outermost first.
        is_gone: Whether its process is no more, or does nothing any more.
        code: The exit code of processes that are ended for it; other than 1, they are ended at once.
    """

    rank: int | None
    place: str
    what: str
    lines: tuple[str, ...] = ()
    is_gone: bool = False
    code: int = 1

    def __str__(self) -> str:
        at = f" at {self.lines[-1]}" if self.lines else ""
        if self.rank is None:
            return self.what
        return f"rank {self.rank}{f' ({self.place})' if self.place else ''} {self.what}{at}"


class FailureBoard:
    """Where the first failure of one run of the job is written, once.

    Args:
        store: The job's key-value store, for this object alone.
        run: Number of the run among those of the job; the same on all ranks.
        num_ranks: Ranks of the job.
        rank: This one.
    """

    def __init__(self, store: Store, run: int, num_ranks: int, rank: int) -> None:
        self._store = store
        self._prefix = f"lightning_pp/run/{run}"
        self.num_ranks = num_ranks
        self.rank = rank
        self._first: RankFailure | None = None

    def post(self, failure: RankFailure) -> RankFailure:
        """Writes ``failure`` unless another came first; returns the one that did."""
        if self._first is None:
            try:
                raw = self._store.compare_set(f"{self._prefix}/failure", "", json.dumps(asdict(failure)))
                self._first = _read(raw)
            except (RuntimeError, ValueError):  # the store has gone with its process
                self._first = failure
        return self._first

    def first(self) -> RankFailure | None:
        """The first failure, if there is one by now.

        Raises:
            RuntimeError: The store cannot be reached.
        """
        if self._first is None and self._store.check([f"{self._prefix}/failure"]):
            self._first = _read(self._store.get(f"{self._prefix}/failure"))
        return self._first

    def wait(self, seconds: float) -> RankFailure | None:
        """:meth:`first`, once it is there, or None after so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if (found := self.first()) is not None:
                    return found
            except RuntimeError:  # what the process of the store died of is still looked for on this host
                if self._first is not None:
                    return self._first
            time.sleep(_POLL_S)
        return None

    def tell(self, name: str, value: str = "") -> None:
        """Notes something of this rank for the others."""
        self._store.set(f"{self._prefix}/{name}/{self.rank}", value)

    def end_of_data(self, data: str) -> tuple[int, int] | None:
        """The rank that has told first that its ``data`` have ended, and after how many batches."""
        key = f"{self._prefix}/data/{data}"
        if not self._store.check([key]):
            return None
        rank, number = json.loads(self._store.get(key))
        return rank, number

    def tell_end_of_data(self, data: str, num_batches: int) -> None:
        """Notes that this rank has run all batches of its ``data``, unless another has done so before."""
        self._store.compare_set(f"{self._prefix}/data/{data}", "", json.dumps([self.rank, num_batches]))

    def ask(self) -> int:
        """Has every rank tell where it stands; returns the number of the question, from 1."""
        return self._store.add(f"{self._prefix}/asked", 1)

    def num_asked(self) -> int:
        """The number of the last question of any rank; 0 if there was none."""
        key = f"{self._prefix}/asked"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def is_first(self, name: str) -> bool:
        """Whether no other rank has called this with ``name``."""
        return self._store.compare_set(f"{self._prefix}/{name}", "", str(self.rank)).decode() == str(self.rank)

    def add(self, name: str, value: str) -> None:
        """Adds a line to what all ranks have added under ``name``; it has no line break of its own."""
        self._store.append(f"{self._prefix}/{name}", value + "\n")

    def added(self, name: str) -> list[str]:
        """What ranks have added under ``name`` by now: one request, however many they are."""
        key = f"{self._prefix}/{name}"
        return self._store.get(key).decode().splitlines() if self._store.check([key]) else []

    def told(self, name: str, rank: int) -> str | None:
        """What ``rank`` has noted under ``name``; None if nothing yet."""
        key = f"{self._prefix}/{name}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None


def _read(raw: bytes) -> RankFailure:
    fields: dict[str, Any] = json.loads(raw)
    return RankFailure(**{**fields, "lines": tuple(fields["lines"])})


def is_about_others(error: BaseException) -> bool:
    """Whether ``error`` says no more than that another rank did not answer."""
    if isinstance(error, (RankStoppedError, dist.DistError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in (
            "gloo",
            "Gloo",
            "NCCL",
            "Connection closed",
            "caused pair closure",
            "Connection reset",
            "Broken pipe",
        )
    )
