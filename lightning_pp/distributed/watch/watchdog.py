"""Watching the other ranks of a run, so that no rank waits for one that has failed, died or been stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, NoReturn

from lightning_pp.distributed.watch.failures import FailureBoard, RankFailure
from lightning_pp.distributed.watch.processes import exit_code_of, is_gone, is_stopped, told_by
from lightning_pp.distributed.watch.standstill import Standstill

_POLL_S = 0.25
# a process that is stopped for less may be one that somebody looks at
_STOPPED_S = 3.0
# until a rank that has not heard of a failure by itself is woken, and until its process is ended
_WAKE_S = 2.0
_END_S = 6.0
_STORE_ANSWERS_S = 2.0
# a rank asks the store some seven things each time; many ranks ask less often, so that one store can answer them all
_MOST_RANKS_PER_S = 2048


class Progress(NamedTuple):
    """How far a rank has come in one pass over its data.

    Attributes:
        data: Which data, in words, the same on every rank.
        num_before: Batches of them in earlier passes, which tells one pass from another.
        num_batches: Batches begun in this one.
        has_ended: Whether there is no other batch in it.
    """

    data: str
    num_before: int
    num_batches: int
    has_ended: bool


class Watchdog:
    """Two threads of a rank: one asks the job's store, one the host, and what they find ends the run here.

    * A failure on the board, or a neighbour on this host that is gone without having left the run, or is stopped.
    * A rank is left alone for two seconds, for most hear of it by the connections that end. Then ``wake`` ends those
      that the rank may still wait in.
    * If the rank that failed is gone and this one is still in the run after six seconds, this process is ended, with
      exit code 1 and one line.

    The thread that asks the store may have to wait for it for ever, if its process is stopped; the other one does not
    need it.

    Args:
        board: Of the run, with a connection of its own to the store.
        neighbours: The other ranks whose processes this one can see, on its host, with their numbers.
        wake: Ends what this rank waits for.
        exit_codes: Asks the launcher, where this process has started others: rank to exit code, negative for a signal.
        standstill: Asks where ranks stand that do not go on, and answers for this one.
        progress: How far this rank has come in its data.
        store_is_of_rank_0: Whether the store ends with the process of rank 0.
    """

    def __init__(
        self,
        board: FailureBoard,
        neighbours: Mapping[int, int],
        wake: Callable[[], None],
        exit_codes: Callable[[], Mapping[int, int]],
        standstill: Standstill,
        progress: Callable[[], Sequence[Progress]],
        *,
        store_is_of_rank_0: bool,
    ) -> None:
        self._board = board
        self._wake = wake
        self._exit_codes = exit_codes
        self._standstill = standstill
        self._progress = progress
        self._ends_told: dict[str, int] = {}
        self._store_is_of_rank_0 = store_is_of_rank_0
        self._ended = threading.Event()
        self._pids = dict(neighbours)
        self._left: set[int] = set()
        self._host = min([board.rank, *neighbours])  # names it among the hosts of the run
        self._goes_on: set[int] = set()
        self._num_polls = 0
        self._store_lost_at: float | None = None
        self._found: RankFailure | None = None
        self._threads = [
            threading.Thread(target=self._ask_store, name="pipeline-watch-store", daemon=True),
            threading.Thread(target=self._watch, name="pipeline-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> RankFailure | None:
        """The first failure of the run, once it is known here, or None after so many seconds."""
        end = time.monotonic() + seconds
        while self._found is None and time.monotonic() < end:
            time.sleep(_POLL_S / 4)
        return self._found

    def one_that_stands(self) -> RankFailure | None:
        """The rank that keeps the others waiting, once all have been told of it; or the failure that came first.

        That is one that runs the user's code and has not moved for long, else one that does not answer. None if there
        is no such rank.
        """
        answers = self._standstill.ask(lambda: self._found is not None)
        for rank, answer in answers.items():
            if answer is not None and not answer.stack.waits and answer.seconds >= self._standstill.silent_s:
                return self.post(RankFailure(rank, answer.place, f"kept the others waiting: it {answer}", is_gone=True))
        for rank, answer in answers.items():
            if answer is None:
                return self.post(RankFailure(rank, "", "does not answer, and others have waited for it", is_gone=True))
        return self._found

    def post(self, failure: RankFailure) -> RankFailure:
        """Tells the others, unless another failure came first; returns the one that did."""

        def post() -> None:
            self._found = self._found or self._board.post(failure)

        # the store's process may be the one that does not answer
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
        keeps_store = self._store_is_of_rank_0 and self._board.rank == 0
        has_told = failure.code != 1 and failure.rank == self._board.rank
        if not keeps_store and not has_told:
            return
        unknown = set(range(self._board.num_ranks)) - {self._board.rank}
        end = time.monotonic() + (_STORE_ANSWERS_S if failure.code == 1 else _END_S)
        with contextlib.suppress(RuntimeError):
            while unknown and time.monotonic() < end:
                time.sleep(_POLL_S / 4)
                gone = {rank for rank in unknown if rank in self._pids and is_gone(self._pids[rank])}
                unknown -= gone | set(map(int, self._board.added("knows")))

    def end(self, *, failed: bool = False) -> None:
        """This rank has left the run; nothing happens to it any more.

        Args:
            failed: Whether it has told of a failure; otherwise the others take its end for the run's.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        for thread in self._threads:
            thread.join(_POLL_S)  # one that waits for the store ends with the process
        if not failed:
            with contextlib.suppress(RuntimeError):
                self._board.add(f"left/{self._host}", str(self._board.rank))

    def _ask_store(self) -> None:
        poll_s = max(_POLL_S, self._board.num_ranks / _MOST_RANKS_PER_S)
        while not self._ended.wait(poll_s):
            if self._is_without_store():
                return
            try:
                deadlock = self._standstill.look()
                if deadlock is not None:
                    self._board.post(deadlock)
                self._left.update(map(int, self._board.added(f"left/{self._host}")))
                self._compare_data()
                self._found = self._found or self._board.first()
                if self._found is not None:
                    self._board.add("knows", str(self._board.rank))
                    return
            except RuntimeError:
                self._store_lost_at = time.monotonic()
                return
            self._num_polls += 1

    def _compare_data(self) -> None:
        """Tells if this rank is in a batch that another has not: one of them would wait for the other for ever.

        Who has run out of data waits soon after it, so it is enough to look from time to time.
        """
        for progress in self._progress():
            data = f"{progress.data}/{progress.num_before}"
            if progress.has_ended and self._ends_told.get(progress.data) != progress.num_before:
                self._ends_told[progress.data] = progress.num_before
                self._board.tell_end_of_data(data, progress.num_batches)
            end = self._board.end_of_data(data)
            if end is not None and end[1] < progress.num_batches:
                rank, number = end
                earlier = f" after {progress.num_before} of earlier passes" if progress.num_before else ""
                what = (
                    f"has {number} batches of {progress.data} data{earlier}, and rank {self._board.rank} has begun "
                    f"batch {progress.num_batches}: every rank must have the same number of batches, or "
                    "unequal_data='shortest' ends all where the first ends"
                )
                self._board.post(RankFailure(rank, "", what))

    def _is_without_store(self) -> bool:
        return self._store_is_of_rank_0 and 0 in self._pids and is_gone(self._pids[0])

    def _watch(self) -> None:
        since: float | None = None
        is_woken = False
        stopped_since: dict[int, float] = {}
        while not self._ended.wait(_POLL_S):
            if self._found is None:
                failure = self._failure_of_neighbour(stopped_since) or self._failure_of_store()
                if failure is not None:
                    self._take_up(failure)
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
                    self._wake()
            if waited > _END_S and self._is_gone(failure) and not self._ended.is_set():
                end_process(failure)

    def _take_up(self, failure: RankFailure) -> None:
        """A process is gone or stopped; one that is stopped is ended, or it would stay when all others have ended."""
        if failure.rank == 0 and self._store_is_of_rank_0:  # its store is no more, or does not answer
            self._found = self._found or failure
        else:
            self.post(failure)
        pid = None if failure.rank is None else self._pids.get(failure.rank)
        if pid is not None and is_stopped(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _is_gone(self, failure: RankFailure) -> bool:
        pid = None if failure.rank is None else self._pids.get(failure.rank)
        return failure.is_gone or (pid is not None and is_gone(pid))

    def _failure_of_neighbour(self, stopped_since: dict[int, float]) -> RankFailure | None:
        for rank, pid in list(self._pids.items()):
            if rank in self._left:
                continue
            if is_gone(pid) and rank in stopped_since:  # another rank has ended it
                return _stopped(rank, pid)
            if is_gone(pid):
                code = exit_code_of(pid)
                if not self._leaves(rank):
                    return RankFailure(rank, "", told_by(self._exit_codes().get(rank, code)), is_gone=True)
            elif not is_stopped(pid):
                if rank in self._goes_on:  # one look may fall in the moment in which it is ended
                    stopped_since.pop(rank, None)
                self._goes_on.add(rank)
                continue
            elif time.monotonic() - stopped_since.setdefault(rank, time.monotonic()) > _STOPPED_S:
                return _stopped(rank, pid)
            self._goes_on.discard(rank)
        return None

    def _failure_of_store(self) -> RankFailure | None:
        """The end of the store, if nobody can see of what it died."""
        lost = self._store_lost_at
        if lost is None or time.monotonic() - lost < _STORE_ANSWERS_S:
            return None
        keeper = "its process keeps" if self._store_is_of_rank_0 else "torchrun's agent keeps"
        return RankFailure(
            0, "", f"cannot be reached: the job's key-value store, which {keeper}, is gone", is_gone=True
        )

    def _leaves(self, rank: int) -> bool:
        """Whether a rank whose process is gone has left the run before, or told of its failure."""
        number, end = self._num_polls, time.monotonic() + _STORE_ANSWERS_S
        while self._num_polls < number + 2 and time.monotonic() < end:
            if self._found is not None or self._ended.is_set():
                break
            time.sleep(_POLL_S / 4)
        return rank in self._left or self._found is not None or self._ended.is_set()


def end_process(failure: RankFailure) -> NoReturn:
    """Ends this process at once, wherever its threads are, and says why."""
    print(f"lightning_pp: this rank ended because {failure}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(failure.code)


def _stopped(rank: int, pid: int) -> RankFailure:
    what = f"was stopped by a signal and did not go on for {_STOPPED_S:.0f} s"
    return RankFailure(rank, f"process {pid}", what, is_gone=True)


def board_of(store: object, run: int, num_ranks: int, rank: int) -> FailureBoard:
    """A board with a connection of its own to the job's store."""
    own = store.clone()  # type: ignore[attr-defined]
    own.set_timeout(timedelta(seconds=30))
    return FailureBoard(own, run, num_ranks, rank)
