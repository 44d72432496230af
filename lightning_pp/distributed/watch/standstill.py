"""Finds the rank for which the others wait, from the positions that all ranks report when one of them asks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping

from lightning_pp.distributed.watch.table import RankFailure, Standing, Table
from lightning_pp.distributed.watch.this_rank import Stack, ThisRank

_SILENT_S = 60.0
# what a rank's threads have to answer a question in, also on a host that is busy
_ANSWER_S = 5.0
_MOST_TOLD = 4


class Standstill:
    """Reports this rank's position when asked, and asks the others in three cases.

    * It waits, and has not moved for a minute: it prints who keeps it waiting. One rank does that for all of them.
    * It has waited in one call for ``deadlock_s``, and is rank 0: if every rank has, that is the run's failure.
    * A time-out has ended what it waited for (:meth:`ask`), or it has waited as long in one call and nothing was raised
      (as over NCCL): the rank that has kept it waiting is the run's failure.

    Args:
        table: Of the run.
        this_rank: This rank.
        report: Is called with the failure.
    """

    def __init__(self, table: Table, this_rank: ThisRank, report: Callable[[RankFailure], object]) -> None:
        self._table = table
        self._this = this_rank
        self._report = report
        self._silent_s = min(_SILENT_S, this_rank.timeout_s / 2)
        self._position = this_rank.position()
        self._moved_at = time.monotonic()
        self._call: int | None = None
        self._waits_since: float | None = None
        self._num_answered = 0
        self._question: tuple[int, float] | None = None
        self._answers: dict[int, Standing | None] = {}
        self._is_silence_noted = self._prints = False
        self._deadlock_due_at = 0.0
        self._call_timed_out: int | None = None
        self._has_timed_out = threading.Event()

    def ask(self) -> Callable[[], bool]:
        """After a time-out: has the next :meth:`look` ask who keeps this rank waiting; from any thread.

        Returns:
            Whether that has been found out, and reported if there is such a rank.
        """
        self._has_timed_out.set()
        return lambda: not self._has_timed_out.is_set()

    def look(self) -> None:
        """Notes whether this rank has moved, answers, and asks if it is time; to be called a few times a second.

        Raises:
            RuntimeError: The store cannot be reached.
        """
        now = time.monotonic()
        number = self._table.num_asked()
        is_asked = number > self._num_answered
        own = self._standing(now, with_stack=is_asked or self._question is not None)
        if is_asked:
            self._num_answered = number
            self._table.tell_standing(number, own)
        if self._question is None:
            if self._is_due(own, now):
                self._question = self._table.ask(), now + _ANSWER_S
                self._answers = {rank: None for rank in range(self._table.num_ranks) if rank != self._table.rank}
            return
        number, end = self._question
        missing = [rank for rank, answer in self._answers.items() if answer is None]
        self._answers |= self._table.standings(number, missing)
        if None not in self._answers.values() or now > end:
            self._question = None
            self._judge(own, now)

    def _standing(self, now: float, *, with_stack: bool) -> Standing:
        """If this rank moves, its stack is read only where it is asked for: what frames hold stays meanwhile."""
        position = self._this.position()
        has_moved = position != self._position
        if has_moved:
            self._position, self._moved_at = position, now
            self._is_silence_noted = self._prints = False
        stack = self._this.stack() if with_stack or not has_moved else Stack(waits=False, lines=())
        if not stack.waits or stack.call != self._call:
            self._call, self._waits_since = stack.call, now if stack.waits else None
        waited = 0.0 if self._waits_since is None else now - self._waits_since
        return Standing(self._this.place(), str(position), now - self._moved_at, stack, waited)

    def _is_due(self, own: Standing, now: float) -> bool:
        """Whether this rank asks where the others stand."""
        rank = self._table.rank
        if own.stack.waits and own.seconds >= self._silent_s and not self._is_silence_noted:
            self._is_silence_noted = True
            self._prints = self._table.tell_first(f"silence/{self._position.batch}", rank) == rank
        if own.waited >= self._this.timeout_s and own.stack.call != self._call_timed_out:
            self._call_timed_out = own.stack.call
            self._has_timed_out.set()
        may_be_deadlock = rank == 0 and own.waited >= self._this.deadlock_s and now >= self._deadlock_due_at
        return self._prints or may_be_deadlock or self._has_timed_out.is_set()

    def _judge(self, own: Standing, now: float) -> None:
        rank, answers, deadlock_s = self._table.rank, self._answers, self._this.deadlock_s
        if self._prints:
            self._prints = False
            told = f"lightning_pp: rank {rank} has waited for {own.seconds:.0f} s, since {own.since}."
            print(told, in_words(answers), file=sys.stderr, flush=True)  # noqa: T201
        least = min([own.waited, *(0.0 if answer is None else answer.waited for answer in answers.values())])
        if least >= deadlock_s:
            what = (
                f"every rank has waited for the others for {deadlock_s:g} s or longer (deadlock_seconds), each in one "
                f"call. {in_words({rank: own, **answers})}"
            )
            self._report(RankFailure(None, "", what, is_gone=True))
        self._deadlock_due_at = now + max(1.0, deadlock_s - least)
        if self._has_timed_out.is_set():
            if (failure := self._stuck_rank()) is not None:
                self._report(failure)
            self._has_timed_out.clear()

    def _stuck_rank(self) -> RankFailure | None:
        """The rank that runs the user's code and has not moved for long, else one that does not answer.

        Of several ranks that run it none is blamed: some may wait for a device there.
        """
        answers = [(rank, answer) for rank, answer in self._answers.items() if answer is not None]
        standing = [each for each in answers if not each[1].stack.waits and each[1].seconds >= self._silent_s]
        if len(standing) > 1:
            what = f"several ranks have not moved, and one of them keeps the others waiting. {in_words(dict(standing))}"
            return RankFailure(None, "", what, is_gone=True)
        for rank, answer in standing:
            return RankFailure(rank, answer.place, f"kept the others waiting: it {answer}", is_gone=True)
        silent = next((rank for rank, answer in self._answers.items() if answer is None), None)
        what = "does not answer, while others wait for it"
        return None if silent is None else RankFailure(silent, "", what, is_gone=True)


def in_words(answers: Mapping[int, Standing | None]) -> str:
    """Who keeps the others waiting, in a sentence for each rank that may."""
    answers = dict(sorted(answers.items()))
    holders = {rank: answer for rank, answer in answers.items() if answer is None or not answer.stack.waits}
    sentences = [
        f"Rank {rank} does not answer: its process is gone, or none of its threads can run."
        if answer is None
        else f"Rank {rank} ({answer.place}) {answer}."
        for rank, answer in (holders or answers).items()
    ]
    if len(sentences) > _MOST_TOLD:
        sentences[_MOST_TOLD:] = [f"And {len(sentences) - _MOST_TOLD} others."]
    return " ".join(sentences if holders else ["No rank runs the user's code.", *sentences])
