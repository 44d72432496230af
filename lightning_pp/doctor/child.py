"""The life of one rank's process of a check: it runs the check, tells what came of it, and ends."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lightning_pp.distributed.loopback import keep_gloo_on_loopback
from lightning_pp.doctor.checks import check_titled
from lightning_pp.doctor.findings import Rank
from lightning_pp.doctor.sharing import limit_memory

Prepare = Callable[[str], None]
"""Called in each process of a check with the check's title before it runs: for tests, which plant faults with it."""


LONGEST_S = 175.0


@dataclass(frozen=True)
class Options:
    """What is asked of the doctor.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        only: Names or titles of checks; empty for all.
        is_quick: Whether checks do less.
        longest_s: Seconds after which no check begins any more.
        limit_s: The most seconds of one check, where that is less than its own limit.
        prepare: Called in each process of a check before it, with the check's title.
    """

    device_type: str = "cpu"
    only: Sequence[str] = ()
    is_quick: bool = False
    longest_s: float = LONGEST_S
    limit_s: float = float("inf")
    prepare: Prepare | None = None


@dataclass(frozen=True)
class Job:
    """What a process is started for.

    Attributes:
        check: Title of the check.
        rank: Global rank.
        environment: Variables that say who the process is, as torchrun sets them, and those of the check.
        options: What is asked of the doctor.
        folder: One that all ranks of the check see.
        shares_device: Whether all ranks are on one device.
    """

    check: str
    rank: int
    environment: dict[str, str]
    options: Options
    folder: Path
    shares_device: bool

    @property
    def output(self) -> Path:
        """The file to print to."""
        return self.folder / f"output-{self.rank}.txt"


def run_rank(connection: Connection, job: Job) -> None:
    """Runs a check on one rank, and ends the process.

    ``connection`` gets ``("noted", text)`` any number of times, and in the end ``("returned", value)`` or ``("raised",
    text)``.
    """
    os.environ.update(job.environment)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as the strategy does, before CUDA starts
    _print_to(job.output)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    code = 0
    try:
        value = _run(connection, job)
        connection.send(("returned", value))
    except BaseException as error:  # a rank that leaves by exit() has failed as well
        traceback.print_exc()
        sys.stderr.flush()
        connection.send(("raised", f"{type(error).__name__}: {error}"))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is waited for: other ranks may have gone, and devices may wait for them


def _run(connection: Connection, job: Job) -> object:
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    num_ranks = int(os.environ["WORLD_SIZE"])
    if here == num_ranks:
        keep_gloo_on_loopback()
    device = torch.device("cpu")
    if job.options.device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        if job.shares_device:
            limit_memory(device, num_ranks)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (num_ranks if job.shares_device else here)))
    check = check_titled(job.check)
    if job.options.prepare is not None:
        job.options.prepare(job.check)

    def note(text: str) -> None:
        connection.send(("noted", text))

    rank = Rank(job.rank, num_ranks, here, device, job.options.is_quick, job.folder, note)
    return check.run(rank, **check.arguments)


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
