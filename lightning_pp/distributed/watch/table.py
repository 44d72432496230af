"""The table of a run: each rank's entries for the others, in the job's key-value store."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from lightning_pp.distributed.watch.this_rank import Stack


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


class Standing(NamedTuple):
    """The position of a rank when it was asked.

    Attributes:
        place: Its host, stages and replica.
        since: How far it had come; as a :class:`Position` is written.
        seconds: For how long it had not moved.
        stack: Of its main thread.
        waited: For how long that has waited in one and the same call, in seconds.
    """

    place: str
    since: str
    seconds: float
    stack: Stack
    waited: float

    def __str__(self) -> str:
        stack = " > ".join(self.stack.lines)
        return f"has not moved since {self.since}, for {self.seconds:.0f} s; its stack: {stack}"


class Table:
    """The entries of the ranks of one run.

    =================  ====================================================  =====================================
    name               what a rank tells                                     who reads it
    =================  ====================================================  =====================================
    ``failure``        how it or another rank failed; the first counts       every rank
    ``data/DATA``      that its data have ended, and after how many          ranks in the same pass over them
                       batches; the first counts
    ``asked``          that it asks where all ranks stand                    every rank, and answers
    ``standing/RANK``  where it stands                                       the rank that has asked
    ``silence/BATCH``  that it prints who keeps the others waiting           the others, which do not then
    ``knows``          that it knows of the failure                          the rank whose end would hide it
    ``left/HOST``      that it has left the run                              the ranks of its host
    =================  ====================================================  =====================================

    Every method but the constructor raises ``RuntimeError`` where the store cannot be reached.

    Args:
        store: The job's key-value store.
        run: Number of the run among those of the job; the same on all ranks.
        num_ranks: Ranks of the job.
        rank: This one.
    """

    def __init__(self, store: Any, run: int, num_ranks: int, rank: int) -> None:
        self._store = store
        self._prefix = f"lightning_pp/run/{run}"
        self.num_ranks = num_ranks
        self.rank = rank

    @classmethod
    def of_job(cls, store: Any, run: int, num_ranks: int, rank: int) -> Table:
        """A table with a connection of its own to the job's store, where nothing else waits."""
        own = store.clone()
        own.set_timeout(timedelta(seconds=30))
        return cls(own, run, num_ranks, rank)

    def tell_failure(self, failure: RankFailure) -> RankFailure:
        """Writes ``failure`` unless another came first; returns the first one."""
        return _failure(self.tell_first("failure", asdict(failure)))

    def failure(self) -> RankFailure | None:
        """The first failure, if there is one by now."""
        told = self.first("failure")
        return None if told is None else _failure(told)

    def tell_first(self, name: str, value: Any) -> Any:
        """Writes ``value`` unless a rank has written under ``name`` before; returns what was written first."""
        return json.loads(self._store.compare_set(f"{self._prefix}/{name}", "", json.dumps(value)))

    def first(self, name: str) -> Any:
        """What was written first under ``name``; None if nothing yet."""
        key = f"{self._prefix}/{name}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def add_rank(self, name: str) -> None:
        """Adds this rank to those that are listed under ``name``."""
        self._store.append(f"{self._prefix}/{name}", f"{self.rank}\n")

    def ranks(self, name: str) -> set[int]:
        """The ranks that are listed under ``name`` by now: one request, however many they are."""
        key = f"{self._prefix}/{name}"
        return set(map(int, self._store.get(key).split())) if self._store.check([key]) else set()

    def ask(self) -> int:
        """Has every rank tell where it stands; returns the number of the question, from 1."""
        return int(self._store.add(f"{self._prefix}/asked", 1))

    def num_asked(self) -> int:
        """The number of the last question of any rank; 0 if there was none."""
        return int(self._store.add(f"{self._prefix}/asked", 0))

    def tell_standing(self, number: int, standing: Standing) -> None:
        """Answers the question ``number``."""
        self._store.set(f"{self._prefix}/standing/{self.rank}", json.dumps((number, *standing)))

    def standings(self, number: int, ranks: Iterable[int]) -> dict[int, Standing | None]:
        """What ``ranks`` have answered to the question ``number``, or to a later one; None if nothing yet."""
        return {rank: _standing(self.first(f"standing/{rank}"), number) for rank in ranks}


def _failure(told: dict[str, Any]) -> RankFailure:
    return RankFailure(**{**told, "lines": tuple(told["lines"])})


def _standing(told: Any, number: int) -> Standing | None:
    if told is None or told[0] < number:
        return None
    _, place, since, seconds, (waits, lines, call), waited = told
    return Standing(place, since, seconds, Stack(waits, tuple(lines), call), waited)
