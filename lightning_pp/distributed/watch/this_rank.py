"""A watchdog's view of its own rank: its progress, what it runs, how to wake it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RankStoppedError(RuntimeError):
    """This rank waited in vain: another rank has ended, or does not continue."""


class Position(NamedTuple):
    """The progress of a rank.

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
    """The stack of a rank's main thread.

    Attributes:
        waits: Whether it may wait for others, since it is in none of the user's code.
        lines: ``file:line in function``, outermost first.
        call: Differs from what it was if the thread has moved.
    """

    waits: bool
    lines: tuple[str, ...]
    call: int = 0


class Progress(NamedTuple):
    """The progress of a rank in one pass over its data.

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


@dataclass(frozen=True)
class ThisRank:
    """One rank of a run. The watchdog's threads call the functions while the main thread works or waits.

    Attributes:
        rank: Its number.
        num_ranks: Of the job.
        place: Where it is: host, stages and replica.
        position: How far it has come in all that it does.
        progress: How far it has come in each of its data.
        stack: What its main thread runs.
        wake: Ends what it waits in.
        exit_codes: What its launcher knows of processes that it has started: rank to exit code, negative for a signal.
        timeout_s: How long a collective may wait. A rank that has waited for half of it, and for a minute at most, says
            once on stderr who keeps it waiting.
        deadlock_s: The run ends if all ranks have waited so long, each in one and the same call.
    """

    rank: int
    num_ranks: int
    place: Callable[[], str]
    position: Callable[[], Position]
    progress: Callable[[], Sequence[Progress]]
    stack: Callable[[], Stack]
    wake: Callable[[], None]
    exit_codes: Callable[[], Mapping[int, int]]
    timeout_s: float
    deadlock_s: float
