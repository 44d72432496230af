"""The processes of a small job on this host, one for each rank: started, watched until they end or their time is up."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Work = Callable[[Callable[[str], None]], Any]
"""The work of a rank; it gets a function to call with the name of each part, so that a hang can be located."""

_STACKS_S = 3.0
_MOST_OUTPUT = 6000


@dataclass(frozen=True)
class RankJob:
    """The task of a rank's process.

    Attributes:
        rank: Global rank.
        work: A :data:`Work`, pickled.
        output: The file to print to.
        environment: Variables that say who the process is, as torchrun sets them, and others.
    """

    rank: int
    work: bytes
    output: Path
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How the process of a rank ended.

    Attributes:
        rank: Global rank.
        value: What its work returned; None if it did not return.
        error: ``Type: message`` of what it raised; empty if it raised nothing.
        noted: What it did last, as it reported.
        noted_after_s: Seconds from the start to that report.
        exit_code: Of the process, as ``multiprocessing`` gives it; None: it ran until the time limit.
        seconds: From the start to the end of the process, or to the limit.
        output: What it printed, and the stacks of its threads if it had to be ended; the last of it.
    """

    rank: int
    value: Any = None
    error: str = ""
    noted: str = ""
    noted_after_s: float = 0.0
    exit_code: int | None = None
    seconds: float = 0.0
    output: str = ""

    @property
    def has_returned(self) -> bool:
        """Whether its work ran through."""
        return self.exit_code == 0 and not self.error

    def __str__(self) -> str:
        while_doing = f" ({self.noted})" if self.noted else ""
        if self.error:
            return f"rank {self.rank}{while_doing} raised {self.error}"
        if self.exit_code is None:
            return f"rank {self.rank}{while_doing} had not ended after {self.seconds:.0f} s"
        if self.exit_code < 0:
            return f"rank {self.rank}{while_doing} was ended by signal {-self.exit_code}"
        return f"rank {self.rank}{while_doing} ended with code {self.exit_code}"


def run_processes(
    jobs: Sequence[RankJob], preload: str, *, limit_s: float = float("inf"), grace_s: float | None
) -> list[Outcome]:
    """Runs a process for each job.

    Args:
        jobs: One for each rank that this process watches.
        preload: Module with all imports of the work: processes are forked from one that has it and touches no device.
        limit_s: Until all of them are ended.
        grace_s: The same after the first that fails; None: ranks are expected to.

    Returns:
        How each ended.

    Raises:
        BrokenPipeError: A process could not be started.
    """
    processes: list[_RankProcess] = []
    deadline = time.monotonic() + limit_s
    outcomes: list[Outcome] = []
    try:
        processes += (_RankProcess(job, preload) for job in jobs)
        while True:
            alive = [process for process in processes if not process.has_ended()]
            if grace_s is not None and any(process.has_failed for process in processes):
                deadline, grace_s = min(deadline, time.monotonic() + grace_s), None
            remaining = deadline - time.monotonic()
            if not alive or remaining <= 0:
                break
            wait([sentinel for process in alive for sentinel in process.sentinels], min(remaining, 1.0))
    finally:
        outcomes += [process.end() for process in processes]
    return outcomes


def variables_to_meet(rank: int, num_ranks: int, address: str, port: int) -> dict[str, str]:
    """Variables of a rank whose job's store is served at an address."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"ranks-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # it is there before the ranks are
    }


def variables_on_this_host(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets, of a job whose ranks are all here, and whose store is served here."""
    return {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        **dict.fromkeys(("ROLE_RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("ROLE_WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks)),
        **variables_to_meet(rank, num_ranks, "127.0.0.1", port),
    }


class _RankProcess:
    """One process."""

    def __init__(self, job: RankJob, preload: str) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([preload])
        self._job = job
        self._told: dict[str, Any] = {}
        self._seconds = self._noted_after_s = 0.0
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_run_rank, args=(other, job), daemon=False)
        self._started = time.monotonic()
        self._process.start()
        other.close()

    @property
    def sentinels(self) -> list[int | Connection]:
        """What to wait for: that it tells something, or ends."""
        return [self._process.sentinel, self._connection] if not self._connection.closed else [self._process.sentinel]

    def has_ended(self) -> bool:
        """Whether the process is no more; takes up what it has told."""
        is_alive = self._process.is_alive()
        with contextlib.suppress(EOFError, OSError):
            while not self._connection.closed and self._connection.poll():
                kind, content = self._connection.recv()
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
        """How it ended; a process that has not ended gets a signal to print its stacks, and is killed."""
        exit_code = None
        if self.has_ended():
            exit_code = self._process.exitcode
        else:
            self._seconds = time.monotonic() - self._started
            self._print_stacks()
            self._process.kill()
            self._process.join()
        self._connection.close()
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


def _run_rank(connection: Connection, job: RankJob) -> None:
    """Does the work of one rank, and ends the process.

    ``connection`` gets ``("noted", text)`` any number of times, and in the end ``("returned", value)`` or ``("raised",
    text)``.
    """
    os.environ.update(job.environment)
    _print_to(job.output)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    code = 0
    try:
        work: Work = pickle.loads(job.work)
        connection.send(("returned", work(lambda text: connection.send(("noted", text)))))
    except BaseException as error:  # a rank that leaves by exit() has failed as well
        sys.stdout.flush()
        traceback.print_exc()
        connection.send(("raised", f"{type(error).__name__}: {error}"))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is waited for: other ranks may have gone, and devices may wait for them


def _print_to(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # what printed before may have been the one of a test runner
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _end_with_parent(connection: Connection) -> None:
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
