"""Where each rank stands, told when another asks: so a rank that keeps the others waiting is found, and its line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from lightning_pp.distributed.watch.failures import FailureBoard, RankFailure

_SILENT_S = 60.0
_POLL_S = 0.05
# what a rank's threads have to answer a question in, also on a host that is busy
_ANSWER_S = 5.0
_MOST_TOLD = 4


class Position(NamedTuple):
    """How far a rank has come.

    Attributes:
        batch: In words: ``batch 812 of training``.
        action: In it (``4F3``); empty outside of a step.
        moves: What it does besides; only whether that is another number than before counts.
    """

    batch: str
    action: str
    moves: int

    def __str__(self) -> str:
        return f"{self.batch}, {self.action}" if self.action else self.batch


class Stack(NamedTuple):
    """What the main thread of a rank runs.

    Attributes:
        waits: Whether it may wait for others, since it is in none of the user's code.
        lines: ``file:line in function``, outermost first.
        call: Differs from what it was if the thread has moved.
    """

    waits: bool
    lines: tuple[str, ...]
    call: int = 0


class Standing(NamedTuple):
    """Where a rank stood when it was asked.

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


class Patience(NamedTuple):
    """How long ranks may wait.

    Attributes:
        timeout_s: A collective. A rank that has waited for half of it, and for a minute at most, says once on stderr
            who keeps it waiting.
        deadlock_s: All ranks, each in one and the same call; then the run ends.
    """

    timeout_s: float
    deadlock_s: float


class Standstill:
    """Asks the ranks where they stand, and answers for this one.

    Args:
        board: Of the run.
        place: Of this rank.
        position: How far this rank has come.
        stack: What its main thread runs.
        patience: How long ranks may wait.
    """

    def __init__(
        self,
        board: FailureBoard,
        place: Callable[[], str],
        position: Callable[[], Position],
        stack: Callable[[], Stack],
        patience: Patience,
    ) -> None:
        self._board = board
        self._place = place
        self._position_now = position
        self._stack = stack
        self.silent_s = min(_SILENT_S, patience.timeout_s / 2)
        """For how long a rank has not moved that keeps the others waiting."""
        self._position = position()
        self._moved_at = time.monotonic()
        self._num_answered = 0
        self._is_told = False
        self._question: tuple[int, float] | None = None
        self._deadlock_s = patience.deadlock_s
        self._call = 0
        self._waits_since: float | None = None
        self._deadlock_question: int | None = None
        self._asks_at = 0.0

    def look(self) -> RankFailure | None:
        """Notes whether this rank has moved, and answers who has asked; to be called a few times a second.

        Returns:
            That all ranks wait for each other, if they do: rank 0 asks, which waits as well then.

        Raises:
            RuntimeError: The store cannot be reached.
        """
        position = self._position_now()
        if position != self._position:
            self._position, self._moved_at, self._is_told = position, time.monotonic(), False
        stack = self._stack()
        if not stack.waits or stack.call != self._call:
            self._call, self._waits_since = stack.call, time.monotonic() if stack.waits else None
        number = self._board.num_asked()
        if number > self._num_answered:
            self._num_answered = number
            self._board.tell("standing", json.dumps((number, *self._own(stack))))
        self._tell_of_silence()
        return self._deadlock(stack)

    def _own(self, stack: Stack) -> Standing:
        now = time.monotonic()
        waited = 0.0 if self._waits_since is None else now - self._waits_since
        return Standing(self._place(), str(self._position), now - self._moved_at, stack, waited)

    def _deadlock(self, stack: Stack) -> RankFailure | None:
        """On rank 0: what ends the run, if every rank has waited in one call for so long."""
        own, now = self._own(stack), time.monotonic()
        if self._board.rank != 0 or own.waited < self._deadlock_s or now < self._asks_at:
            self._deadlock_question = None if own.waited < self._deadlock_s else self._deadlock_question
            return None
        if self._deadlock_question is None:
            self._deadlock_question = self._board.ask()
            self._asks_at = now + min(1.0, self._deadlock_s)
            return None
        answers = {0: own, **self._answers(self._deadlock_question)}
        waited = [0.0 if answer is None else answer.waited for answer in answers.values()]
        if min(waited) < self._deadlock_s:
            self._deadlock_question = None
            self._asks_at = now + max(1.0, self._deadlock_s - min(waited))
            return None
        what = (
            f"every rank has waited for the others for {self._deadlock_s:g} s or longer (deadlock_seconds), each in "
            f"one call. {in_words(answers)}"
        )
        return RankFailure(None, "", what, is_gone=True)

    def ask(self, is_settled: Callable[[], bool]) -> dict[int, Standing | None]:
        """Where the other ranks stand; None for one that has not answered within five seconds.

        Args:
            is_settled: Whether the question has become idle; then nothing is returned.
        """
        try:
            number, end = self._board.ask(), time.monotonic() + _ANSWER_S
            answers = self._answers(number)
            while None in answers.values() and time.monotonic() < end:
                if is_settled():
                    return {}
                time.sleep(_POLL_S)
                answers |= self._answers(number, [rank for rank, answer in answers.items() if answer is None])
        except RuntimeError:  # the store has ended, and who kept it is the failure
            return {}
        return answers

    def _answers(self, number: int, ranks: Iterable[int] | None = None) -> dict[int, Standing | None]:
        if ranks is None:
            ranks = (rank for rank in range(self._board.num_ranks) if rank != self._board.rank)
        return {rank: _read(self._board.told("standing", rank), number) for rank in ranks}

    def _tell_of_silence(self) -> None:
        """After a minute in which this rank waits: which rank it waits for. One rank tells it for all of them."""
        now = time.monotonic()
        seconds = now - self._moved_at
        if self._question is None:
            if self._is_told or seconds < self.silent_s or not self._stack().waits:
                return
            self._is_told = True
            if self._board.is_first(f"silence/{self._position.batch}"):
                self._question = self._board.ask(), now + _ANSWER_S
            return
        number, end = self._question
        answers = self._answers(number)
        if self._is_told and None in answers.values() and now < end:
            return
        self._question = None
        if self._is_told:  # it has not moved meanwhile
            own = f"lightning_pp: rank {self._board.rank} has waited for {seconds:.0f} s, since {self._position}."
            print(own, in_words(answers), file=sys.stderr, flush=True)  # noqa: T201


def in_words(answers: Mapping[int, Standing | None]) -> str:
    """Who keeps the others waiting, in a sentence for each rank that may."""
    holders = {rank: answer for rank, answer in answers.items() if answer is None or not answer.stack.waits}
    sentences = [
        f"Rank {rank} does not answer: its process is gone, or lets none of its threads run."
        if answer is None
        else f"Rank {rank} ({answer.place}) {answer}."
        for rank, answer in (holders or answers).items()
    ]
    if len(sentences) > _MOST_TOLD:
        sentences[_MOST_TOLD:] = [f"And {len(sentences) - _MOST_TOLD} others."]
    return " ".join(sentences if holders else ["No rank runs the user's code.", *sentences])


def _read(told: str | None, number: int) -> Standing | None:
    """An answer to that question or a later one."""
    if told is None:
        return None
    answered, place, since, seconds, (waits, lines, call), waited = json.loads(told)
    return Standing(place, since, seconds, Stack(waits, tuple(lines), call), waited) if answered >= number else None
