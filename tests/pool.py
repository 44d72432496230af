"""A pool of live worker processes for distributed tests.

Importing torch and Lightning takes seconds, so one process does it, from which the workers are forked, and these are
reused: :meth:`WorkerPool.run` calls one module-level function in each of ``world_size`` workers, under the environment
that ``torchrun`` would set. After a run in which every rank returned, each worker undoes what the function left behind.
Nothing of any other run is used again: a rank that fails tells so and exits, the others are killed, and all of them are
replaced. To clean up after a failure would mean to destroy process groups that threads may still wait in.

Life of one run, seen from the main process::

    wait for the workers; replace those that did not come back from their last run
    open a store where the ranks find each other, as torchrun's agent does
    send the function to each rank
    collect the results; after the first failure the other ranks get ``grace`` seconds
    a failure: note the stacks of ranks that did not answer, and replace all workers of the run
    none: tell them to clean up, which they do while the main process goes on
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from pool_worker import PRELOADED, Failure, Task, pack, unpack, worker_main
from torch.distributed import TCPStore

START_TIMEOUT_S = 180.0
CLEAN_UP_TIMEOUT_S = 20.0
_PRELOADED = ["pool_worker", *PRELOADED, "pool_warm"]
RUNS_OF_A_WORKER = 100  # then it is replaced, so that what runs leave in a process does not add up for ever


@dataclass(frozen=True)
class FailureReport:
    """The outcome of a run that was expected to fail: one entry per rank (None: it returned), and the duration."""

    failures: list[Failure | None]
    seconds: float


class WorkerError(RuntimeError):
    """A rank of a pool run raised, died or hung; the message has every rank's traceback."""


def fork_context() -> ForkServerContext:
    """Starts processes from one that has imported what takes long, so that starting one takes little."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
    try:
        forkserver.ensure_running()  # what it cannot import it leaves out without a word
    finally:
        del os.environ["PYTHONPATH"]
        os.environ.update({} if before is None else {"PYTHONPATH": before})
    return context


def fork_from_here() -> None:
    """The process that all others are forked from is forked from this one, which has imported all tests.

    It waits until it is needed, and does then what would take each of the others time. To be called before any test.
    """
    resource_tracker.ensure_running()  # or the patched function would start it
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        _serve_forks(theirs)
    theirs.close()

    def pass_on(path: str, arguments: list[str], descriptors: list[int]) -> int:
        socket.send_fds(ours, [b"start"], descriptors)
        return pid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multiprocessing.util.spawnv_passfds", pass_on)
        forkserver.ensure_running()
    ours.close()


def _serve_forks(connection: socket.socket) -> None:
    """In the process that is forked first, without what pytest captures."""
    _, descriptors, *_ = socket.recv_fds(connection, len("start"), 8)
    faulthandler.disable()
    logging.getLogger().handlers.clear()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    try:
        if descriptors[0] in select.select(descriptors, [], [])[0]:  # the first process is wanted
            forkserver.main(*descriptors, _PRELOADED)
    finally:
        os._exit(0)


class _Worker:
    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="pool_stack_")
        os.close(descriptor)
        self.stack_file = Path(name)
        context = fork_context()
        self.connection, child = context.Pipe()
        # Not a daemon: daemonic processes may not have children, and a test may use DataLoader workers.
        self.process = context.Process(target=worker_main, args=(child, name))
        self.process.start()
        child.close()
        self.is_ready = False
        self.num_runs = 0
        self.test = ""  # of the last run
        self.kept = ""  # what that run left, if it is more than what a worker can undo

    def wait_until_ready(self) -> bool:
        if not self.is_ready:
            timeout_s = CLEAN_UP_TIMEOUT_S if self.num_runs else START_TIMEOUT_S
            with contextlib.suppress(EOFError, OSError):
                told = self.connection.recv_bytes().decode() if self.connection.poll(timeout_s) else ""
                self.is_ready, self.kept = told == "ready", told.removeprefix("ready")
        return self.is_ready

    def begin(self, task: Task, payload: bytes) -> None:
        self.is_ready = False
        self.num_runs += 1
        self.test = os.environ.get("PYTEST_CURRENT_TEST", "a run outside of tests")
        self.connection.send_bytes(pickle.dumps(task))
        self.connection.send_bytes(payload)

    def clean_up(self) -> None:
        """Lets the worker undo what the run left; :meth:`wait_until_ready` tells whether it managed."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(b"clean up")

    def stack(self) -> str:
        """The Python stacks of all its threads, for a worker that hangs."""
        with contextlib.suppress(ProcessLookupError, OSError):
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 5.0  # a loaded machine takes its time
            while not self.stack_file.stat().st_size and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.3)
        return self.stack_file.read_text() if self.stack_file.exists() else ""

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        self.connection.close()
        self.process.join(CLEAN_UP_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.stack_file.unlink(missing_ok=True)


class WorkerPool:
    """Up to ``max_workers`` processes, started when a run first needs them and kept alive between runs."""

    def __init__(self, max_workers: int = 4) -> None:
        self.max_workers = max_workers
        self._workers: list[_Worker] = []
        self._leaks: list[str] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout: float = 60.0,
        grace: float = 10.0,
        process_group: bool | str = False,
        environ: Mapping[str, str] | None = None,
        expect_failure: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call ``function(*args, **kwargs)`` on every rank.

        Args:
            function: Defined at the top of a module; test modules that cannot be imported by name are loaded from file.
            world_size: Number of ranks.
            timeout: Seconds for the call itself; the start of workers does not count.
            grace: Seconds that the other ranks get after the first failure.
            process_group: True initialises a gloo group before the call; a string names another backend.
            environ: Further environment variables of the call.
            expect_failure: Return a :class:`FailureReport` in place of raising; a run without a failure then raises.

        Returns:
            The results by rank, with tensors copied to the CPU; with ``expect_failure`` the report.

        Raises:
            WorkerError: A rank raised, died or did not answer in time.
            AssertionError: ``expect_failure`` was set and every rank returned.
        """
        if not 1 <= world_size <= self.max_workers:
            raise ValueError(f"world_size={world_size} is outside 1..{self.max_workers}, the size of this pool")
        if "<locals>" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not at the top of its module, so workers cannot import it")
        workers = self._ready_workers(world_size)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        backend = process_group if isinstance(process_group, str) else "gloo" if process_group else None
        payload = pack((args, kwargs))
        start = time.monotonic()
        for rank, worker in enumerate(workers):
            task = Task(
                module=function.__module__,
                file=sys.modules[function.__module__].__file__ or "",
                qualname=function.__qualname__,
                environ={**torchrun_environ(rank, world_size, store.port), **(environ or {})},
                sys_path=list(sys.path),
                process_group=backend,
                timeout_s=timeout,
            )
            worker.begin(task, payload)
        outcomes = self._collect(workers, start, timeout, grace)
        seconds = time.monotonic() - start
        self._finish(outcomes)
        failures = [outcome if isinstance(outcome, Failure) else None for outcome in outcomes]
        if expect_failure:
            if not any(failures):
                raise AssertionError(f"{function.__qualname__} was expected to fail, but every rank returned")
            return FailureReport(failures, seconds)
        if any(failures):
            raise WorkerError(_report(function.__qualname__, failures))
        return [outcome[0] for outcome in outcomes]

    def refusals(self, error: str | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
        """The messages with which every rank ends, each by an exception of class ``error`` where one is named."""
        failures = self.run(function, *args, expect_failure=True, **kwargs).failures
        assert all(failure is not None and error in (None, failure.type) for failure in failures), failures
        return [failure.message for failure in failures if failure is not None]

    def close(self) -> None:
        """End all workers; a warning names each test after which a worker still had threads of process groups."""
        for rank, worker in enumerate(self._workers):
            self._is_ready(rank)
            worker.close()
        self._workers.clear()
        leaks, self._leaks = self._leaks, []
        if leaks:
            warnings.warn("process groups stayed alive in workers:\n" + "\n".join(leaks), stacklevel=1)

    def _ready_workers(self, count: int) -> list[_Worker]:
        self._workers += [_Worker() for _ in range(count - len(self._workers))]
        for rank in range(count):
            if not self._is_ready(rank):
                self._replace(rank)
        for worker in self._workers[:count]:
            if not worker.wait_until_ready():
                raise WorkerError(f"a worker did not start within {START_TIMEOUT_S:.0f} s\n{worker.stack()}")
        return self._workers[:count]

    def _is_ready(self, rank: int) -> bool:
        """Whether the worker has cleaned up after its last run; what stays is noted once."""
        worker = self._workers[rank]
        is_ready = worker.wait_until_ready()
        if worker.kept:
            self._leaks.append(f"{worker.kept} after {worker.test} on rank {rank}")
            worker.kept = ""
        return is_ready

    def _replace(self, rank: int) -> None:
        """The new worker starts while the main process goes on."""
        self._workers[rank].kill()
        self._workers[rank] = _Worker()

    def _finish(self, outcomes: list[Failure | tuple[Any] | None]) -> None:
        """Makes the workers of a run ready for the next one."""
        has_failed = any(isinstance(outcome, Failure) for outcome in outcomes)
        for rank in range(len(outcomes)):
            if has_failed or self._workers[rank].num_runs == RUNS_OF_A_WORKER:
                self._replace(rank)
            else:
                self._workers[rank].clean_up()

    @staticmethod
    def _collect(
        workers: list[_Worker], start: float, timeout_s: float, grace_s: float
    ) -> list[Failure | tuple[Any] | None]:
        """The outcome of each rank: a failure, a result in a tuple, or a failure that stands for a hang."""
        outcomes: list[Failure | tuple[Any] | None] = [None] * len(workers)
        pending = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = start + timeout_s
        reason = f"no result after the timeout of {timeout_s:.0f} s"
        while pending and (remaining := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), remaining):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    outcomes[rank] = unpack(connection.recv_bytes())
                except (EOFError, OSError):
                    workers[rank].process.join(5)
                    outcomes[rank] = Failure("WorkerDied", f"exit code {workers[rank].process.exitcode}", "")
                if isinstance(outcomes[rank], Failure) and time.monotonic() + grace_s < deadline:
                    deadline = time.monotonic() + grace_s
                    reason = f"still running {grace_s:.0f} s after another rank failed"
        for rank in pending.values():
            outcomes[rank] = Failure("WorkerHung", reason, workers[rank].stack())
        return outcomes


def _report(name: str, failures: list[Failure | None]) -> str:
    lines = [f"{name} failed on {sum(f is not None for f in failures)} of {len(failures)} ranks"]
    for rank, failure in enumerate(failures):
        if failure is None:
            lines.append(f"--- rank {rank}: returned")
        else:
            lines.append(f"--- rank {rank}: {failure.type}: {failure.message}\n{failure.traceback}")
    return "\n".join(lines)


def torchrun_environ(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets; a store has to listen at the port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"pool-{port}",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        # All ranks are clients of a store that is there. Else rank 0 hosts it, and a rank that asks before that asks
        # again after most of a second.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
