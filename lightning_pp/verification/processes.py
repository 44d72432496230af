"""The processes of a run: started, waited for, and ended with the first that fails."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so

from lightning_pp.strategy import PipelineParallelStrategy
from lightning_pp.verification.recording import Facts, Job, train_twice

_GRACE_S = 30.0


@dataclass(frozen=True)
class Failure:
    """Why a run has no values.

    Attributes:
        kind: Name of the exception.
        message: Its text; of one that is not of this package the traceback.
    """

    kind: str
    message: str


_HINT = (
    "If verify() is called at the top of a script, it has to stand under "
    '`if __name__ == "__main__":`, since each process reads the script again.'
)
_NOT_STARTED = Failure("RuntimeError", f"a process could not be started. {_HINT}")


def run(job: Job) -> list[Facts] | Failure:
    """Trains in ``job.num_processes`` processes of the CPU; each rank's facts, or the first failure."""
    job.folder.mkdir(parents=True, exist_ok=True)
    context = get_context("forkserver")
    context.set_forkserver_preload(["lightning_pp.verification.recording"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, ranks = [], {}
    try:
        for rank in range(job.num_processes):
            connection, other = context.Pipe()
            process = context.Process(target=_run_rank, args=(other, pickle.dumps(job), rank, store.port))
            process.start()
            other.close()
            processes.append(process)
            ranks[connection] = rank
        return _results(ranks, processes, job)
    except BrokenPipeError:  # while one was started
        return _NOT_STARTED
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(ranks: dict[Connection, int], processes: Sequence[BaseProcess], job: Job) -> list[Facts] | Failure:
    results: dict[int, Facts] = {}
    failures: list[Failure] = []
    deadline = float("inf")
    while ranks and time.monotonic() < deadline:
        for connection in wait(list(ranks), 1.0):
            assert isinstance(connection, Connection)
            rank = ranks.pop(connection)
            try:
                result = connection.recv()
            except EOFError:
                result = _ended(processes[rank], job.folder / f"rank{rank}.log")
            if isinstance(result, Failure):
                failures.append(result)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            else:
                results[rank] = result
    # a rank that only hears of another's failure may be the first to say so
    own = [failure for failure in failures if failure.kind != "RankStoppedError"]
    return next(iter([*own, *failures]), None) or [results[rank] for rank in sorted(results)]


def _ended(process: BaseProcess, log: Path) -> Failure:
    """How a process ended that has sent no result."""
    process.join(_GRACE_S)
    lines = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
    last = "".join(f"\n  {line}" for line in lines)
    told = f"a process has ended with exit code {process.exitcode} and without a result"
    return Failure("RuntimeError", f"{told}. Its last lines:{last}" if lines else f"{told}. {_HINT}")


def _run_rank(connection: Connection, job: bytes, rank: int, port: int) -> None:
    result: Facts | Failure
    try:
        result = _trained(pickle.loads(job), rank, port)
    except BaseException as error:  # a rank that leaves by exit() has failed as well
        is_own = type(error).__module__.startswith("lightning_pp")
        result = Failure(type(error).__name__, str(error) if is_own else traceback.format_exc())
    connection.send(result)
    os._exit(0)  # nothing is waited for: other ranks may have gone


def _trained(job: Job, rank: int, port: int) -> Facts:
    log = os.open(job.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    torch.set_num_threads(1)  # the same sums in the same order, with and without a pipeline
    if job.num_processes > 1:
        os.environ.update(_environment(rank, job.num_processes, port))
        PipelineParallelStrategy()  # prepares the process as the user's own did, which is only unpickled here
    return train_twice(job, rank)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(num_ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"verify-{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
