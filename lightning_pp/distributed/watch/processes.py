"""What the host tells of other processes: whether they are gone, and of what, or stopped."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

_PROCESSES = Path("/proc")


def this_machine() -> str:
    """Tells whether two ranks can see each other's processes: host, boot and process namespace; empty if none can."""
    try:
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink(_PROCESSES / 'self/ns/pid')}"
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, SIGTSTP) has stopped the process."""
    return _state_of(pid)[0] == "T"


def is_gone(pid: int) -> bool:
    """Whether the process has ended, even if nobody has asked for its exit code yet."""
    return _state_of(pid)[0] in ("", "Z", "X")


def exit_code_of(pid: int) -> int | None:
    """As what a process has ended that nobody has asked for its exit code yet, negative for a signal; else None."""
    return _state_of(pid)[1]


def told_by(code: int | None) -> str:
    """How a process has ended, as a part of a sentence.

    Args:
        code: Its exit code, negative for a signal; None if nobody knows.
    """
    if code is None:
        return "has ended without a word: killed, perhaps for want of memory"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"was killed by {name}{', perhaps for want of memory' if name == 'SIGKILL' else ''}"
    return f"left in the middle of the run, with exit code {code}"


def _state_of(pid: int) -> tuple[str, int | None]:
    try:
        fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", None
    if fields[0] != "Z":
        return fields[0], None
    status = int(fields[-1])
    return "Z", -(status & 0x7F) if status & 0x7F else status >> 8
