"""Runs the command line in a process of its own: started as a user does, or forked from one with torch imported."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pool import fork_context, torchrun_environ
from pool_worker import freeze
from torch.distributed import TCPStore

import lightning_pp

_TESTS = str(Path(__file__).parents[1])
_SET_BY_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")

#: A model and a run small enough that a test spends its time on starting processes.
TINY_RUN = [
    "trainer.max_steps=4",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.num_sanity_val_steps=0",
    "trainer.log_every_n_steps=1",
    "model.num_layers=2",
    "model.dim=16",
    "model.num_heads=2",
    "model.max_seq_len=32",
    "data.seq_len=32",
    "data.batch_size=4",
    "data.num_val_crops=4",
    "strategy.num_microbatches=2",
    "strategy.check_first_batches=false",
]


@dataclass
class Finished:
    """How a command ended, with its stdout and stderr together."""

    code: int
    output: str


def run_command(
    arguments: list[str],
    folder: Path,
    launcher: tuple[str, ...] = (),
    timeout_s: float = 150.0,
    module: str = "lightning_pp",
) -> Finished:
    """``python -m MODULE ARGUMENTS`` in ``folder``; the whole process group is ended if it hangs."""
    process = start_command(arguments, folder, launcher, module)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the command did not end within {timeout_s:.0f} s; its output:\n{output}") from None
    return Finished(process.returncode, output)


def start_command(
    arguments: list[str], folder: Path, launcher: tuple[str, ...] = (), module: str = "lightning_pp"
) -> subprocess.Popen[str]:
    """Starts what :func:`run_command` runs, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", module, *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_forked(
    arguments: list[str], folder: Path, num_processes: int = 1, timeout_s: float = 120.0, module: str = "lightning_pp"
) -> Finished:
    """As :func:`run_command`, without the seconds that importing takes; processes that it launches itself are new ones.

    Args:
        arguments: Of ``python -m MODULE``.
        folder: Where it runs.
        num_processes: With more than one, each process has the environment that ``torchrun`` gives, and the first that
            fails ends the others.
        timeout_s: For all of them.
        module: What runs.
    """
    context = fork_context()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = [
        torchrun_environ(rank, num_processes, store.port) if num_processes > 1 else {} for rank in range(num_processes)
    ]
    with tempfile.NamedTemporaryFile("r") as output:
        processes = [
            context.Process(target=_run_module, args=(module, arguments, folder, environment() | of_rank, output.name))
            for of_rank in told
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        running = list(processes)
        while running and not any(process.exitcode for process in processes) and time.monotonic() < deadline:
            wait([process.sentinel for process in running], deadline - time.monotonic())
            running = [process for process in processes if process.exitcode is None]
        codes = [process.exitcode for process in processes]
        for process in running:
            process.kill()
            process.join()
        if not any(codes) and None in codes:
            raise AssertionError(f"the command did not end within {timeout_s:.0f} s; its output:\n{output.read()}")
        return Finished(next((code for code in codes if code), 0), output.read())


def _run_module(module: str, arguments: list[str], folder: Path, environment: dict[str, str], output: str) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as where Python is started, not the forkserver's
    if module == "lightning_pp.cli.verify":  # whose own forkserver would first have to import torch
        contexts: Any = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        contexts["forkserver"] = contexts["fork"]
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    sys.argv[1:] = arguments
    for name, imported in list(sys.modules.items()):  # a new process would know none of the tests' own modules
        if str(getattr(imported, "__file__", "")).startswith(_TESTS):
            del sys.modules[name]
    freeze()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_LAUNCHERS}
    package_parent = str(Path(lightning_pp.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "140", "WANDB_SILENT": "true"}
    environment.pop("HYDRA_FULL_ERROR", None)
    return environment


def torchrun(num_processes: int) -> tuple[str, ...]:
    """The launcher for :func:`run_command`."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes))
