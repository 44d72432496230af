"""The processes of other ranks on this host: whether they have ended, and why, or are stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_pp.distributed.watch.table import RankFailure

_PROCESSES = Path("/proc")
# a process that is stopped for less may be one that somebody looks at
_STOPPED_S = 3.0


def this_machine() -> str:
    """Tells whether two ranks can see each other's processes: host, boot and process namespace; empty if none can."""
    try:
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink(_PROCESSES / 'self/ns/pid')}"
    except OSError:
        return ""


def is_gone(pid: int) -> bool:
    """Whether the process has ended, even if its exit code has not been read yet."""
    return _state_of(pid)[0] in ("", "Z", "X")


class Neighbours:
    """The other ranks whose processes this one can see, on its host.

    Args:
        pids: The number of each rank's process.
        exit_codes: What the launcher knows of processes that it has started: rank to exit code, negative for a signal.

    Attributes:
        left: Ranks that have left the run, whose processes may do what they like.
    """

    def __init__(self, pids: Mapping[int, int], exit_codes: Callable[[], Mapping[int, int]]) -> None:
        self._pids = dict(pids)
        self._exit_codes = exit_codes
        self.left: set[int] = set()
        self._stopped_since: dict[int, float] = {}
        self._goes_on: set[int] = set()

    def is_gone(self, rank: int | None) -> bool:
        """Whether ``rank`` is one of them, and its process has ended."""
        return rank in self._pids and is_gone(self._pids[rank])

    def end_stopped(self, rank: int | None) -> None:
        """Ends the process of ``rank`` if it is stopped: it would stay when all others have ended."""
        if rank in self._pids and _state_of(self._pids[rank])[0] == "T":
            with contextlib.suppress(OSError):
                os.kill(self._pids[rank], signal.SIGKILL)

    def failure(self, has_left: Callable[[int], bool]) -> RankFailure | None:
        """A rank whose process has ended within the run, or does not go on; to be called a few times a second.

        Args:
            has_left: Whether a rank whose process has ended had left the run.
        """
        for rank, pid in self._pids.items():
            if rank in self.left:
                continue
            state, code = _state_of(pid)
            if state in ("", "Z", "X"):
                if rank in self._stopped_since:  # another rank has ended it
                    return self._stopped(rank)
                if not has_left(rank):
                    return RankFailure(rank, "", _ended(self._exit_codes().get(rank, code)), is_gone=True)
            elif state != "T":
                if rank in self._goes_on:  # one look may fall in the moment in which it is ended
                    self._stopped_since.pop(rank, None)
                self._goes_on.add(rank)
                continue
            elif time.monotonic() - self._stopped_since.setdefault(rank, time.monotonic()) > _STOPPED_S:
                return self._stopped(rank)
            self._goes_on.discard(rank)
        return None

    def _stopped(self, rank: int) -> RankFailure:
        what = f"was stopped by a signal and did not continue within {_STOPPED_S:.0f} s"
        return RankFailure(rank, f"process {self._pids[rank]}", what, is_gone=True)


def _ended(code: int | None) -> str:
    """How a process has ended, as a part of a sentence; by its exit code, None if not known."""
    if code is None:
        return "ended without a message: it was killed, or crashed in native code"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"was killed by {name}{', perhaps because memory ran out' if name == 'SIGKILL' else ''}"
    return f"exited in the middle of the run with exit code {code}"


def _state_of(pid: int) -> tuple[str, int | None]:
    """The state of a process; with Z, as what it has ended, negative for a signal."""
    try:
        fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", None
    if fields[0] != "Z":
        return fields[0], None
    status = int(fields[-1])
    return "Z", -(status & 0x7F) if status & 0x7F else status >> 8
