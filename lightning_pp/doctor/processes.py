"""Starting the processes of a check, and watching them until they end or their time is up."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from lightning_pp.doctor.child import Job, run_rank
from lightning_pp.doctor.findings import Outcome

GRACE_S = 15.0
"""How long the other ranks have to end after one has failed: those of a training do so within ten seconds."""
_STACKS_S = 3.0
_MOST_OUTPUT = 6000


class RankProcess:
    """One process, which is forked from one that has imported everything and has touched no device.

    Args:
        job: What it does.
    """

    def __init__(self, job: Job) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["lightning_pp.doctor.child"])
        self._job = job
        self._told: dict[str, Any] = {}
        self._seconds = self._noted_after_s = 0.0
        self.connection, other = context.Pipe()
        self._process = context.Process(target=run_rank, args=(other, job), daemon=False)
        self._started = time.monotonic()
        self._process.start()
        other.close()

    @property
    def sentinels(self) -> list[int | Connection]:
        """What to wait for: that it tells something, or ends."""
        return [self._process.sentinel, self.connection] if not self.connection.closed else [self._process.sentinel]

    def has_ended(self) -> bool:
        """Whether the process is no more; takes up what it has told."""
        is_alive = self._process.is_alive()
        with contextlib.suppress(EOFError, OSError):
            while not self.connection.closed and self.connection.poll():
                kind, content = self.connection.recv()
                self._told[kind] = content
                if kind == "noted":
                    self._noted_after_s = time.monotonic() - self._started
        if not is_alive and not self._seconds:
            self._seconds = time.monotonic() - self._started
            self._process.join()
        return not is_alive

    @property
    def has_failed(self) -> bool:
        """Whether it has raised, or died."""
        return "raised" in self._told or (not self._process.is_alive() and "returned" not in self._told)

    def end(self) -> Outcome:
        """How it ended; one that has not is told to print its stacks, and killed."""
        exit_code = None
        if self.has_ended():
            exit_code = self._process.exitcode
        else:
            self._seconds = time.monotonic() - self._started
            self._print_stacks()
            self._process.kill()
            self._process.join()
        self.connection.close()
        output = self._job.output.read_text(errors="replace") if self._job.output.exists() else ""
        return Outcome(
            self._job.rank,
            self._told.get("returned"),
            self._told.get("raised", ""),
            self._told.get("noted", ""),
            round(self._noted_after_s, 2),
            exit_code,
            round(self._seconds, 2),
            output[-_MOST_OUTPUT:],
        )

    def _print_stacks(self) -> None:
        pid = self._process.pid
        assert pid is not None
        before = self._job.output.stat().st_size if self._job.output.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline and self._process.is_alive():
            time.sleep(0.1)
            if self._job.output.exists() and self._job.output.stat().st_size > before:
                time.sleep(0.2)
                return


def run_processes(jobs: Sequence[Job], limit_s: float, grace_s: float | None) -> list[Outcome]:
    """Runs a process for each job.

    Args:
        jobs: One for each rank that this process watches.
        limit_s: Until all of them are ended.
        grace_s: The same after the first that fails; None: ranks are expected to.

    Returns:
        How each ended.
    """
    processes = [RankProcess(job) for job in jobs]
    deadline = time.monotonic() + limit_s
    try:
        while True:
            alive = [process for process in processes if not process.has_ended()]
            if grace_s is not None and any(process.has_failed for process in processes):
                deadline, grace_s = min(deadline, time.monotonic() + grace_s), None
            remaining = deadline - time.monotonic()
            if not alive or remaining <= 0:
                break
            wait([sentinel for process in alive for sentinel in process.sentinels], min(remaining, 1.0))
    finally:
        outcomes = [process.end() for process in processes]
    return outcomes
