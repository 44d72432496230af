"""Watching the other ranks of a run, so that no rank waits for one that has failed, died or been stopped."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

from lightning_pp.distributed.watch.processes import Neighbours
from lightning_pp.distributed.watch.standstill import Standstill
from lightning_pp.distributed.watch.table import RankFailure, Table
from lightning_pp.distributed.watch.this_rank import ThisRank

_POLL_S = 0.25
# until a rank that has not heard of a failure by itself is woken, and until its process is ended
_WAKE_S = 2.0
_END_S = 6.0
_STORE_ANSWERS_S = 2.0
_ALL_ANSWER_S = 6.0
# a rank asks the store some seven things each time; many ranks ask less often, so that one store can answer them all
_MOST_RANKS_PER_S = 2048


class Watchdog:
    """Two threads of a rank: one reads the table, one looks at the host. A failure that they find ends the run here.

    * A failure in the table, or a neighbour on this host that is gone without having left the run, or is stopped.
    * A rank is left alone for two seconds, for most hear of it by the connections that end. Then ``wake`` ends those
      that the rank may still wait in.
    * If the rank that failed is gone and this one is still in the run after six seconds, this process is ended, with
      exit code 1 and one line.

    The thread that reads the table may have to wait for the store for ever, if its process is stopped; the other one
    does not need it.

    Args:
        table: Of the run, with a connection of its own to the store.
        this_rank: This rank.
        pids: The other ranks whose processes this one can see, on its host, with their numbers.
        store_is_of_rank_0: Whether the store ends with the process of rank 0.
    """

    def __init__(self, table: Table, this_rank: ThisRank, pids: Mapping[int, int], *, store_is_of_rank_0: bool) -> None:
        self._table = table
        self._this = this_rank
        self._neighbours = Neighbours(pids, this_rank.exit_codes)
        self._standstill = Standstill(table, this_rank, self.post)
        self._ends_told: dict[str, int] = {}
        self._store_is_of_rank_0 = store_is_of_rank_0
        self._ended = threading.Event()
        self._left_here = f"left/{min([table.rank, *pids])}"  # the lowest rank names the host
        self._num_reads = 0
        self._store_lost_at: float | None = None
        self._found: RankFailure | None = None
        self._threads = [
            threading.Thread(target=self._read_table, name="pipeline-watch-store", daemon=True),
            threading.Thread(target=self._watch_host, name="pipeline-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> RankFailure | None:
        """The first failure of the run, once it is known here, or None after so many seconds."""
        end = time.monotonic() + seconds
        while self._found is None and time.monotonic() < end:
            time.sleep(_POLL_S / 4)
        return self._found

    def stuck_rank(self) -> RankFailure | None:
        """The rank that keeps the others waiting, once all know of it; or the failure that came first.

        That is one that runs the user's code and has not moved for long, else one that does not answer. None if there
        is no such rank.
        """
        is_settled, end = self._standstill.ask(), time.monotonic() + _ALL_ANSWER_S
        while self._found is None and not is_settled() and time.monotonic() < end:
            time.sleep(_POLL_S / 4)
        return self._found

    def post(self, failure: RankFailure) -> RankFailure:
        """Reports to the others, unless another failure came first; returns the first one."""

        def post() -> None:
            # the store may have gone with its process
            with contextlib.suppress(RuntimeError, ValueError):
                self._found = self._found or self._table.tell_failure(failure)

        # or its process may be the one that does not answer
        thread = threading.Thread(target=post, daemon=True)
        thread.start()
        thread.join(_STORE_ANSWERS_S)
        self._found = self._found or failure
        return self._found

    def wait_until_known(self, failure: RankFailure) -> None:
        """Returns when every rank knows of the failure, or has had two seconds, if the store ends with this process.

        A failure with a code of its own has six seconds, and is waited for on the rank that has told it as well: a rank
        that only loses its connections would end with another code, and may be held up by the error for two seconds.
        """
        keeps_store = self._store_is_of_rank_0 and self._table.rank == 0
        has_told = failure.code != 1 and failure.rank == self._table.rank
        if not keeps_store and not has_told:
            return
        unknown = set(range(self._table.num_ranks)) - {self._table.rank}
        end = time.monotonic() + (_STORE_ANSWERS_S if failure.code == 1 else _END_S)
        with contextlib.suppress(RuntimeError):
            while unknown and time.monotonic() < end:
                time.sleep(_POLL_S / 4)
                unknown -= {rank for rank in unknown if self._neighbours.is_gone(rank)} | self._table.ranks("knows")

    def end(self, *, failed: bool = False) -> None:
        """This rank has left the run; nothing happens to it any more.

        Args:
            failed: Whether it has reported a failure; otherwise the others take its end for the run's.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        for thread in self._threads:
            thread.join(_POLL_S)  # one that waits for the store ends with the process
        if not failed:
            with contextlib.suppress(RuntimeError):
                self._table.add_rank(self._left_here)

    def _read_table(self) -> None:
        poll_s = max(_POLL_S, self._table.num_ranks / _MOST_RANKS_PER_S)
        while not self._ended.wait(poll_s):
            if self._store_is_of_rank_0 and self._neighbours.is_gone(0):
                return
            try:
                self._standstill.look()
                self._neighbours.left |= self._table.ranks(self._left_here)
                self._compare_data()
                self._found = self._found or self._table.failure()
                if self._found is not None:
                    self._table.add_rank("knows")
                    return
            except RuntimeError:
                self._store_lost_at = time.monotonic()
                return
            self._num_reads += 1

    def _compare_data(self) -> None:
        """Tells if this rank is in a batch that another has not: one of them would wait for the other for ever.

        Who has run out of data waits soon after it, so it is enough to look from time to time.
        """
        for progress in self._this.progress():
            name = f"data/{progress.data}/{progress.num_before}"
            if progress.has_ended and self._ends_told.get(progress.data) != progress.num_before:
                self._ends_told[progress.data] = progress.num_before
                self._table.tell_first(name, [self._table.rank, progress.num_batches])
            rank, number = self._table.first(name) or (None, progress.num_batches)
            if number < progress.num_batches:
                earlier = f" after {progress.num_before} of earlier passes" if progress.num_before else ""
                what = (
                    f"has {number} batches of {progress.data} data{earlier}, but rank {self._table.rank} has begun "
                    f"batch {progress.num_batches}. Give every rank the same number of batches, or set "
                    "unequal_data='shortest' to end all of them with the first"
                )
                self._table.tell_failure(RankFailure(rank, "", what))

    def _watch_host(self) -> None:
        since: float | None = None
        is_woken = False
        while not self._ended.wait(_POLL_S):
            if self._found is None:
                failure = self._neighbours.failure(self._has_left) or self._failure_of_store()
                if failure is not None:
                    self._apply(failure)
            failure = self._found
            if failure is None:
                continue
            if failure.code != 1:
                self.wait_until_known(failure)
                end_process(failure)
            since = time.monotonic() if since is None else since
            waited = time.monotonic() - since
            if waited > _WAKE_S and not is_woken:
                is_woken = True
                with contextlib.suppress(Exception):  # what is only half made; the end below comes all the same
                    self._this.wake()
            is_gone = failure.is_gone or self._neighbours.is_gone(failure.rank)
            if waited > _END_S and is_gone and not self._ended.is_set():
                end_process(failure)

    def _apply(self, failure: RankFailure) -> None:
        """A process is gone or stopped, or the store is."""
        if failure.rank == 0 and self._store_is_of_rank_0:  # its store is no more, or does not answer
            self._found = self._found or failure
        else:
            self.post(failure)
        self._neighbours.end_stopped(failure.rank)

    def _failure_of_store(self) -> RankFailure | None:
        """The end of the store, if its cause is not known."""
        lost = self._store_lost_at
        if lost is None or time.monotonic() - lost < _STORE_ANSWERS_S:
            return None
        keeper = "its process keeps" if self._store_is_of_rank_0 else "torchrun's agent keeps"
        what = f"cannot be reached: the job's key-value store, which {keeper}, is gone"
        return RankFailure(0, "", what, is_gone=True)

    def _has_left(self, rank: int) -> bool:
        """Whether a rank whose process is gone has left the run before, or reported its failure."""
        number, end = self._num_reads, time.monotonic() + _STORE_ANSWERS_S
        while self._num_reads < number + 2 and time.monotonic() < end:
            if self._found is not None or self._ended.is_set():
                break
            time.sleep(_POLL_S / 4)
        return rank in self._neighbours.left or self._found is not None or self._ended.is_set()


def end_process(failure: RankFailure) -> NoReturn:
    """Ends this process at once, wherever its threads are, and says why."""
    print(f"lightning_pp: this rank ended because {failure}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(failure.code)
